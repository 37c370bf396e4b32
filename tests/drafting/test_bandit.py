"""The bandit against simulated engines, with the measured cost of drafting on a GPU (vLLM, 8B model, H200)."""

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.drafter import PLAIN, Adaptive, EagleDrafter, NgramDrafter, Strategy
from asyncrl.drafting.bandit import Bandit, Range

CHAINS = (Strategy(depth=1), Strategy(depth=3), Strategy(depth=6))
DRAFTER = EagleDrafter(tokens=6, adaptive=Adaptive(strategies=CHAINS))
ACCEPTED = {0: 1.0, 1: 1.8, 3: 3.0, 6: 4.5}
"""Mean tokens per step of one answer."""
SPEEDUP = {
    1: {0: 1.0, 1: 1.6, 3: 2.3, 6: 2.8},
    8: {0: 1.0, 1: 1.6, 3: 2.3, 6: 2.8},
    32: {0: 1.0, 1: 1.5, 3: 2.1, 6: 2.1},
    128: {0: 1.0, 1: 1.2, 3: 1.28, 6: 0.92},
    256: {0: 1.0, 1: 0.95, 3: 0.85, 6: 0.6},
}


@dataclass
class Engine:
    """Steps with noise, and now and then a very slow one; a step after a switch takes twice as long."""

    speedup: dict[int, float]
    random: Random = field(default_factory=lambda: Random(0))
    before: int = -1

    def seconds(self, depth: int) -> float:
        """Of a usual step."""
        return 0.01 * ACCEPTED[depth] / self.speedup[depth]

    def step(self, batch: int, depth: int) -> tuple[int, float]:
        noise = self.random.lognormvariate(0, 0.05) * (20 if self.random.random() < 0.005 else 1)
        switch = 2 if depth != self.before else 1
        self.before = depth
        share = (ACCEPTED[depth] - 1) / depth if depth else 0.0
        accepted = sum(self.random.random() < share for _ in range(batch * depth))
        return batch + accepted, self.seconds(depth) * noise * switch


def run(bandit: Bandit, engine: Engine, batch: int, steps: int) -> list[int]:
    """The chosen depths."""
    chosen: list[int] = []
    for _ in range(steps):
        strategy = bandit.choose(batch)
        tokens, seconds = engine.step(batch, strategy.depth)
        bandit.record(batch, strategy, tokens, seconds)
        chosen.append(strategy.depth)
    return chosen


def gain(engine: Engine, chosen: list[int]) -> float:
    """Tokens per second of these steps against plain decoding; a switch costs another step."""
    switches = [a != b for a, b in pairwise(chosen)]
    time = sum(engine.seconds(depth) * (1 + cost) for depth, cost in zip(chosen[1:], switches, strict=True))
    return sum(ACCEPTED[depth] for depth in chosen[1:]) / time * 0.01


@pytest.mark.parametrize("batch", SPEEDUP)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_within_5_percent_of_the_best_and_never_below_plain_decoding(batch: int, seed: int) -> None:
    engine = Engine(SPEEDUP[batch], Random(seed))
    bandit = Bandit(DRAFTER, seed)
    learning = run(bandit, engine, batch, 300)
    assert set(learning) == {0, 1, 3, 6}, "every arm is tried"
    reached = gain(engine, run(bandit, engine, batch, 3000))
    assert reached >= 0.95 * max(SPEEDUP[batch].values())
    assert reached >= 0.985


def test_arms_that_are_clearly_worse_are_looked_at_less_and_less_but_never_forgotten() -> None:
    engine = Engine({0: 1.0, 1: 0.5, 3: 0.5, 6: 0.5})
    bandit = Bandit(DRAFTER, 0)
    run(bandit, engine, 128, 5_000)
    others = sum(depth != 0 for depth in run(bandit, engine, 128, 40_000))
    assert 0 < others < 40_000 * DRAFTER.adaptive.epsilon / 4


def test_it_follows_when_another_arm_becomes_the_best() -> None:
    bandit = Bandit(DRAFTER, 0)
    run(bandit, Engine(SPEEDUP[256]), 256, 2000)
    assert bandit.choose(256).depth == 0
    better = Engine(SPEEDUP[128])  # the head has learned: drafting pays now
    run(bandit, better, 256, 30_000)
    assert gain(better, run(bandit, better, 256, 1000)) >= 0.95 * 1.28
    worse = Engine(SPEEDUP[256])  # the policy has moved: the arm in use notices by itself
    run(bandit, worse, 256, 100)
    assert gain(worse, run(bandit, worse, 256, 1000)) >= 0.95


def test_ranges_learn_on_their_own() -> None:
    bandit = Bandit(DRAFTER, 0)
    for _ in range(20):
        for batch in (1, 32, 256):
            run(bandit, Engine(SPEEDUP[batch]), batch, 50)
    assert [bandit._range(batch).best for batch in (1, 256)] == [3, 0]  # pyright: ignore[reportPrivateUsage]
    assert bandit.choose(1000).depth in (0, 1, 3, 6), "above the last range is in it"


def test_report_in_numbers() -> None:
    """Plain: 4 tokens in 10 ms; depth 2: 10 tokens in 20 ms."""
    bandit = Bandit(NgramDrafter(tokens=2, adaptive=Adaptive(ranges=(1, 3), strategies=(Strategy(depth=2),))), 0)
    for _ in range(6):
        bandit.record(4, PLAIN, 4, 0.01)
    for _ in range(300):
        bandit.record(4, Strategy(depth=2), 10, 0.02)
    plain, drafting = bandit.report()
    assert (plain.batch, plain.depth, plain.verify, plain.steps) == (3, 0, 0, 4), (
        "two steps after a switch are left out"
    )
    assert (drafting.batch, drafting.depth, drafting.verify, drafting.steps) == (3, 2, 2, 298)
    assert plain.tokens_per_second == pytest.approx(400)
    assert drafting.tokens_per_second == pytest.approx(500)


def test_one_slow_step_does_not_matter() -> None:
    bandit = Bandit(DRAFTER, 0)
    for index in range(20):
        bandit.record(1, PLAIN, 1, 60.0 if index == 10 else 0.01)
    assert bandit.report()[0].tokens_per_second == pytest.approx(100)


def test_at_one_answer_the_mean_of_the_tokens_counts_not_their_median() -> None:
    """Mostly nothing is accepted, sometimes all: 1, 1, 1, 7 is 2.5 tokens a step."""
    bandit = Bandit(DRAFTER, 0)
    for _ in range(40):
        bandit.record(1, PLAIN, 1, 0.01)
    for index in range(400):
        bandit.record(1, CHAINS[2], 7 if index % 4 == 0 else 1, 0.02)
    assert bandit.report()[1].tokens_per_second == pytest.approx(125, rel=0.02)


def test_what_was_learned_survives_a_restart() -> None:
    engine = Engine(SPEEDUP[8])
    bandit = Bandit(DRAFTER, 0)
    run(bandit, engine, 8, 500)
    saved = msgspec.json.encode(bandit.state())
    other = Bandit(DRAFTER, 1, msgspec.json.decode(saved, type=list[Range]))
    assert other.report() == bandit.report()
    assert run(other, engine, 8, 200).count(6) > 150, "nothing is tried from the beginning"
    changed = Bandit(EagleDrafter(tokens=4), 0, msgspec.json.decode(saved, type=list[Range]))
    assert changed.report() == (), "figures of other strategies say nothing"


@pytest.mark.parametrize(("tokens", "depths"), [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_without_strategies_chains_double_up_to_tokens(tokens: int, depths: list[int]) -> None:
    bandit = Bandit(EagleDrafter(tokens=tokens), 0)
    assert [arm.strategy.depth for arm in bandit.state()[0].arms] == [0, *depths]


def test_a_trees_own_strategy_is_among_the_arms() -> None:
    bandit = Bandit(EagleDrafter(tokens=3, top_k=2, verify=8), 0)
    assert Strategy(depth=3, top_k=2, verify=8) in [arm.strategy for arm in bandit.state()[0].arms]


@settings(max_examples=50, deadline=None)
@given(
    batches=st.lists(st.integers(0, 300), min_size=1, max_size=300),
    pace=st.dictionaries(st.sampled_from([0, 1, 3, 6]), st.floats(1e-4, 1.0), max_size=4),
    counted=st.booleans(),
)
def test_any_stream_of_steps_gives_sound_figures(batches: list[int], pace: dict[int, float], counted: bool) -> None:
    """Also if no step can be counted: choices are arms, figures are sound, the arm in use is no worse."""
    bandit = Bandit(DRAFTER, 0)
    for batch in batches:
        strategy = bandit.choose(batch)
        assert strategy == PLAIN or strategy in CHAINS
        if counted and batch:
            bandit.record(batch, strategy, batch * (strategy.depth + 1), pace.get(strategy.depth, 0.01))
    for here in bandit.state():
        rates = [arm.rate for arm in here.arms]
        assert rates[here.best] * 1.02 >= max(rates)
        assert all(arm.runs <= 3 for arm in here.arms) or any(rates)
    assert all(arm.tokens_per_second > 0 for arm in bandit.report())


def test_a_strategy_with_two_kinds_of_steps_is_judged_by_both() -> None:
    """Plain steps alternate between 7 ms and, with new prompts, 11 ms; drafts take 8.5 ms for as many tokens."""
    bandit = Bandit(EagleDrafter(path="head", tokens=3, adaptive=Adaptive(strategies=(Strategy(depth=3),))), seed=0)
    taken = {PLAIN: [0.007, 0.011], Strategy(depth=3): [0.0085, 0.0085]}
    for strategy, seconds in taken.items():
        for step in range(40):
            bandit.record(4, strategy, 4, seconds[step % 2])
    plain, drafted = (arm.tokens_per_second for arm in bandit.report())
    assert plain == pytest.approx(4 / 0.009, rel=0.02)
    assert drafted == pytest.approx(4 / 0.0085, rel=1e-6)
