"""What is asked next: shares are kept, the band is held while a learner improves, and the same past gives the same
choices."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Run, load
from asyncrl.config.curriculum import Curriculum as Settings
from asyncrl.config.task import ChainsTask, MixTask, Source
from asyncrl.curriculum.policy import REPLAYED, Curriculum, CurriculumState, make_curriculum
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import keep_here
from asyncrl.tasks.base import sizes
from asyncrl.tasks.registry import make_task

BAND = (0.2, 0.8)
GROUPS = 16
"""Of a step."""
weights = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


def make(shares: Sequence[float] = (1.0,), sizes: Sequence[int | None] = (), **changes: Any) -> Curriculum:
    return Curriculum(Settings(band=BAND, **changes), shares, sizes, seed=5)


def step(curriculum: Curriculum, rate: Callable[[int], float], groups: int = GROUPS) -> list[int]:
    """Ask for so many prompts, then measure them all; returns the prompts."""
    asked: list[int] = []
    for _ in range(groups):
        prompt, drawn = curriculum.choose()
        curriculum.ask(prompt, drawn)
        asked.append(prompt)
    curriculum.measure(asked, [rate(prompt) for prompt in asked])
    return asked


def copied(state: CurriculumState) -> CurriculumState:
    """Through the bytes that the journal has."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=CurriculumState)


class Learner:
    """Prompts have difficulties; whoever was trained on what it sometimes solved solves more."""

    def __init__(self, size: int, seed: int) -> None:
        random = Random(seed)
        self.difficulty = [random.gauss(0, 3) for _ in range(size)]
        self.skill, self.random = -3.0, random

    def true_rate(self, prompt: int) -> float:
        return 1 / (1 + exp(2 * (self.difficulty[prompt % len(self.difficulty)] - self.skill)))

    def rate(self, prompt: int) -> float:
        """Of a group of eight."""
        chance = self.true_rate(prompt)
        return sum(self.random.random() < chance for _ in range(8)) / 8

    def learn(self, asked: Sequence[int]) -> None:
        self.skill += 0.01 * sum(rate * (1 - rate) * 4 for rate in map(self.true_rate, asked))


def in_band(learner: Learner, asked: Sequence[int]) -> float:
    return sum(BAND[0] <= learner.true_rate(prompt) <= BAND[1] for prompt in asked) / len(asked)


@pytest.mark.parametrize("size", [200, None], ids=["table", "endless"])
@pytest.mark.parametrize("seed", range(5))
def test_the_band_is_held_while_a_learner_improves(size: int | None, seed: int) -> None:
    """Against the prompts in order, which have as many of every difficulty at any time."""
    curriculum, prompts = make(sizes=[size], replay=0.5), size or 5000
    learners = {"curriculum": Learner(prompts, seed), "order": Learner(prompts, seed)}
    shares: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(120):
        asked = {
            "curriculum": step(curriculum, learners["curriculum"].rate),
            "order": [place % prompts for place in range(number * GROUPS, (number + 1) * GROUPS)],
        }
        for name, learner in learners.items():
            shares[name].append(in_band(learner, asked[name]))
            learner.learn(asked[name])
    after_a_pass = slice(200 // GROUPS, 80)
    held, before = (sum(shares[name][after_a_pass]) for name in ("curriculum", "order"))
    assert held > 1.3 * before
    assert learners["curriculum"].skill > learners["order"].skill


@given(weights, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**16))
def test_shares_of_sources_are_kept_at_any_time(weights: list[float], replay: float, hard: float, seed: int) -> None:
    curriculum, random = make(weights, replay=replay, hard=hard), Random(seed)
    asked: Counter[int] = Counter()
    for total in range(1, 200):
        for prompt in step(curriculum, lambda _: random.choice([0.0, 0.5, 1.0]), groups=1):
            asked[curriculum.interleaving.locate(prompt)[0]] += 1
        for source, weight in enumerate(weights):
            assert abs(asked[source] - total * weight / sum(weights)) < len(weights)


@given(st.floats(0, 1), st.floats(0, 1))
def test_shares_of_replays_are_kept(replay: float, hard: float) -> None:
    """Prompts are always hard or in the band, so there is always one of each to replay after the first."""
    curriculum = make(replay=replay, hard=hard)
    kinds: Counter[str] = Counter()
    step(curriculum, lambda prompt: 0.5 * (prompt % 2))
    for _ in range(300):
        prompt, drawn = curriculum.choose()
        kinds["replayed" if drawn == REPLAYED else "fresh"] += 1
        kinds["hard"] += drawn == REPLAYED and prompt in curriculum.state.sources[0].below
        curriculum.ask(prompt, drawn)
        curriculum.measure([prompt], [0.5 * (prompt % 2)])
    assert abs(kinds["replayed"] - 300 * replay) <= 2
    assert abs(kinds["hard"] - kinds["replayed"] * hard) <= 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=150),
    st.integers(0, 150),
    st.sampled_from(["fixed", "follow"]),
)
def test_the_same_past_gives_the_same_choices_from_any_moment_on(
    events: list[tuple[int, float]], moment: int, follow: str
) -> None:
    """`events`: what happens next, and with which reward. At one moment the state goes through its bytes."""
    ours, theirs = (make([2, 1], [7, None], weights=follow, pool=3) for _ in range(2))
    in_flight: list[int] = []
    for number, (what, rate) in enumerate(events):
        if number == moment:
            theirs = make([2, 1], [7, None], weights=follow, pool=3)
            theirs.state = copied(ours.state)
        if what < 2 or not in_flight:
            choice = ours.choose()
            assert choice == theirs.choose()
            assert choice == ours.choose(), "a decision changes nothing"
            ours.ask(*choice)
            theirs.ask(*choice)
            in_flight.append(choice.prompt)
        else:
            prompt = in_flight.pop(int(rate * (len(in_flight) - 1)))
            for each in (ours, theirs):
                each.release(prompt) if what == 2 else each.measure([prompt], [rate])
    assert copied(ours.state) == copied(theirs.state) == ours.state
    assert list(ours.state.sources[0].band) == list(theirs.state.sources[0].band), "the order of waiting counts"


def test_a_table_is_asked_whole_before_anything_comes_again() -> None:
    curriculum = make(sizes=[50], replay=0)
    first = [prompt for _ in range(5) for prompt in step(curriculum, lambda _: 0.5, groups=10)]
    second = [prompt for _ in range(5) for prompt in step(curriculum, lambda _: 0.5, groups=10)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first == list(range(50)), "the source has shuffled it"
    assert second != first


def test_what_is_too_easy_is_left_out_of_three_passes_in_four() -> None:
    curriculum = make(sizes=[40], replay=0, revisit=4)
    easy = set(range(0, 40, 2))
    asked: Counter[int] = Counter()
    for _ in range(40 + 4 * 20 + 20):  # a pass over all, then four over the others and a quarter of the easy ones
        asked.update(step(curriculum, lambda prompt: 1.0 if prompt in easy else 0.5, groups=1))
    assert {asked[prompt] for prompt in easy} == {2}
    assert all(asked[prompt] == 5 for prompt in range(40) if prompt not in easy)


def test_a_source_where_all_is_too_easy_is_asked_still() -> None:
    curriculum = make(sizes=[5], replay=0, revisit=10**6)
    assert len(step(curriculum, lambda _: 1.0, groups=1) + step(curriculum, lambda _: 1.0, groups=20)) == 21


def test_the_pool_keeps_what_was_measured_last_and_endless_sources_nothing_else() -> None:
    curriculum = make(replay=0, pool=4)
    for _ in range(10):
        step(curriculum, lambda prompt: (0.0, 0.5, 1.0)[prompt % 3], groups=9)
    (source,) = curriculum.state.sources
    assert list(source.below) == [78, 81, 84, 87]
    assert list(source.band) == [79, 82, 85, 88]
    assert set(curriculum.state.known) == {*source.band, *source.below}


def test_a_group_without_a_reward_changes_nothing_that_was_known() -> None:
    curriculum = make(replay=1.0, hard=0)
    (prompt,) = step(curriculum, lambda _: 0.5, groups=1)
    assert curriculum.choose() == (prompt, REPLAYED)
    curriculum.ask(prompt, REPLAYED)
    fresh, drawn = curriculum.choose()
    assert (fresh, drawn) == (1, 2), "what is being asked is not asked again"
    curriculum.ask(fresh, drawn)
    curriculum.release(fresh)
    curriculum.release(prompt)
    assert curriculum.choose() == (prompt, REPLAYED)


def test_weights_that_follow_leave_a_source_that_teaches_nothing() -> None:
    rates = {0: 0.5, 1: 0.0, 2: 1.0}
    asked: Counter[int] = Counter()
    curriculum = make([1, 1, 1], weights="follow", replay=0)
    for _ in range(60):
        prompts = step(curriculum, lambda prompt: rates[curriculum.interleaving.locate(prompt)[0]])
        asked.update(curriculum.interleaving.locate(prompt)[0] for prompt in prompts)
    assert curriculum.shares() == pytest.approx([10 / 12, 1 / 12, 1 / 12], abs=0.02)
    assert asked[0] > 2 * (asked[1] + asked[2]) > 0


def mix(**tasks: Any) -> MixTask:
    return MixTask(sources={name: Source(task=task) for name, task in tasks.items()})


def test_a_run_has_a_curriculum_if_it_has_a_band() -> None:
    assert make_curriculum(Run(), [None]) is None
    assert make_curriculum(Run(curriculum=Settings(band=BAND)), [None]) is not None
    table = {"type": "python", "function": keep_here(lambda: [f"{i}+1=" for i in range(40)], "test/table")}
    task = make_task(load({"task": table | {"held_out": 0.25}}).task, seed=0)
    assert (sizes(task), sizes(make_task(ChainsTask(), 0))) == ([30], [None])
    assert sizes(make_task(mix(b=load({"task": table}).task, a=ChainsTask()), 0)) == [None, 38], "sorted by name"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"band": [0.8, 0.2]}, "band=[0.8, 0.2] must be [low, high] with low below high"),
        ({"band": [0.2]}, "curriculum.band=[0.2]: expected `array` of length 2"),
        ({"replay": 1.5}, "curriculum.replay=1.5: expected `float` <= 1.0"),
        ({"weights": "follow"}, "curriculum.weights=follow needs a band to follow: set curriculum.band=[0.2,0.8]"),
        ({"weights": "follow", "band": [0.2, 0.8]}, "task=chains is one; use task=mix, or curriculum.weights=fixed"),
    ],
)
def test_what_cannot_work_is_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"curriculum": raw})
    assert said in str(caught.value)
