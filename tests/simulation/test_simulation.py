"""Hand-computed times, and what must hold whatever the costs are."""

from math import isclose
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.config.algorithm import Dapo
from asyncrl.config.engine import FakeEngine
from asyncrl.config.fleet import Elastic
from asyncrl.config.staleness import EssBand
from asyncrl.errors import ConfigError
from asyncrl.simulation.engine import Pace
from asyncrl.simulation.loop import Simulation, simulate
from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.profile import (
    Affine,
    Answers,
    EngineCost,
    ExpertStep,
    Fixed,
    LogNormal,
    Profile,
    Recorded,
    RewardCost,
    Sharing,
    Speculation,
    SyncCost,
    Table,
    TrainerCost,
)

AT_ONCE = RewardCost(gather=0.0)


def one_run(
    *,
    steps: int = 3,
    staleness: int = 0,
    groups: int = 2,
    size: int = 2,
    take: int = 2,
    ready: int | Literal["auto"] = 0,
    **rest: object,
) -> Run:
    return Run(
        steps=steps,
        max_staleness=staleness,
        rollout=Rollout(group_size=size, max_tokens=10_000),
        flow=Flow(groups_per_step=groups, groups_per_take=take, max_ready_groups=ready, group_timeout_s=1e6),
        buffer=Buffer(max_bytes=1 << 40),
        **rest,  # pyright: ignore[reportArgumentType]
    )


def costs(tokens: int = 100, **rest: object) -> Profile:
    """Four rows of 100 tokens, a step of 0.01 + 0.001 * rows seconds: 1.4 s."""
    engine = EngineCost(step=Affine(seconds=0.01, per_row=0.001))
    return msgspec.structs.replace(Profile(lengths=Fixed(tokens=tokens), engine=engine, reward=AT_ONCE), **rest)


def test_synchronous_steps_are_the_sum_of_their_parts() -> None:
    trainer = TrainerCost(per_token=0.004, per_take=0.5, per_step=0.25)
    found = simulate(one_run(), costs(trainer=trainer, sync=SyncCost(seconds=2.0)), trainer_gpus=2)
    # 1.4 s of decoding; 0.5 + 400 tokens * 0.004 / 2 of training; 0.25 of update; 2 s until the weights are there
    assert isclose(found.rates.step_seconds, 1.4 + 0.5 + 0.8 + 0.25 + 2.0)
    assert isclose(found.rates.wait_seconds, 1.4 + 2.0 * 2 / 3)  # for the first step nothing is published before
    assert (found.rates.staleness_max, found.publications, found.dropped) == (0, 3, {})


def test_with_room_to_run_ahead_the_slower_side_sets_the_pace() -> None:
    slow_trainer = simulate(one_run(steps=20, staleness=1), costs(trainer=TrainerCost(per_step=5.0)), warm_up=3)
    assert isclose(slow_trainer.rates.step_seconds, 5.0)
    assert slow_trainer.rates.trainer_wait == 0
    slow_engine = simulate(one_run(steps=20, staleness=4), costs(trainer=TrainerCost(per_step=0.1)), warm_up=5)
    # 20 rows at a time, 0.03 s a step: 400 tokens in 100 / 20 * 4 steps of 0.03 s
    assert isclose(slow_engine.rates.step_seconds, 100 * 0.03 * 4 / 20, rel_tol=0.05)
    assert slow_engine.rates.staleness_max <= 4


def test_training_begins_before_the_last_group_is_there() -> None:
    lengths = Recorded(groups=((100, 100),))
    engine = EngineCost(step=Affine(seconds=0.01), max_batch=2)  # one group after the other
    early = Profile(lengths=lengths, engine=engine, reward=AT_ONCE, trainer=TrainerCost(per_take=0.0, per_token=0.005))
    assert isclose(simulate(one_run(take=1), early).rates.step_seconds, 1.0 + max(1.0, 1.0) + 1.0)
    assert isclose(simulate(one_run(take=2), early).rates.step_seconds, 2.0 + 2.0)


def test_the_cost_of_context_is_exact() -> None:
    engine = EngineCost(step=Affine(seconds=0.01), per_context_token=1e-4)
    found = simulate(one_run(steps=1), costs(engine=engine, prompt_tokens=50))
    # four rows, 50 tokens each at first and one more with every token
    assert isclose(found.rates.step_seconds, 100 * 0.01 + 1e-4 * 4 * (50 * 100 + 100 * 100 / 2))


def test_an_answer_that_joins_in_the_middle() -> None:
    """Batches of 2: the third and fourth begin when the first two have ended, whatever the context costs."""
    engine = EngineCost(step=Affine(seconds=0.01), per_context_token=1e-4, max_batch=2)
    found = simulate(one_run(steps=1), costs(engine=engine))
    assert isclose(found.rates.step_seconds, 2 * (100 * 0.01 + 1e-4 * 2 * 100 * 100 / 2))
    assert isclose(found.rates.batch_mean, 2)


@pytest.mark.parametrize(("up_to", "seconds"), [(0, 1.4 * 1.5 / 3), (3, 1.4)])
def test_drafts_give_more_tokens_a_step_and_cost_more(up_to: int, seconds: float) -> None:
    drafts = Speculation(accepted=3.0, cost=1.5, up_to_batch=up_to)
    engine = EngineCost(step=Affine(seconds=0.01, per_row=0.001), speculation=drafts)
    assert isclose(simulate(one_run(steps=1), costs(engine=engine)).rates.step_seconds, seconds)


def test_steps_from_a_table() -> None:
    table = Table(rows=(1, 4, 8), seconds=(0.01, 0.02, 0.06))
    assert [table.at(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([0.01, 0.04 / 3, 0.02, 0.04, 0.06, 0.08])
    found = simulate(one_run(steps=1), costs(engine=EngineCost(step=table)))
    assert isclose(found.rates.step_seconds, 100 * 0.02)


def test_a_step_reads_the_experts_that_its_tokens_are_sent_to() -> None:
    step = ExpertStep(experts=4, active=1, seconds=0.01, all_experts=0.016, per_row=0.001)
    assert [step.at(rows) for rows in (0, 1, 2, 100)] == pytest.approx([0.01, 0.015, 0.019, 0.126])
    found = simulate(one_run(steps=1), costs(engine=EngineCost(step=step)))
    assert isclose(found.rates.step_seconds, 100 * (0.01 + 0.016 * (1 - 0.75**4) + 0.004))


def test_the_share_of_experts_is_that_of_random_routing() -> None:
    rng, step = np.random.default_rng(0), ExpertStep(experts=128, active=8, all_experts=1.0)
    for rows in (1, 8, 32, 128):
        chosen = rng.random((200, rows, 128)).argpartition(8, axis=-1)[..., :8]
        drawn = np.mean([len(np.unique(each)) for each in chosen]) / 128
        assert step.at(rows) == pytest.approx(drawn, abs=0.005)


def test_drafted_tokens_are_rows_that_read_experts_too() -> None:
    """Few rows: checking three tokens each reads nearly four times the experts, and drafts hardly pay; many rows read
    all experts anyway."""

    def gain(rows: int) -> float:
        step = ExpertStep(experts=128, active=8, all_experts=1.0)
        plain, drafting = (
            Pace(EngineCost(step=step, speculation=drafts)).per_token[rows]
            for drafts in (Speculation(), Speculation(accepted=3.0, drafted=3))
        )
        return plain / drafting

    assert gain(1) == pytest.approx(3 * (8 / 128) / (1 - (1 - 8 / 128) ** 4))
    assert gain(1) < 0.85
    assert gain(128) == pytest.approx(3, rel=0.01)


def test_training_costs_the_parameters_that_a_token_uses() -> None:
    given = TrainerCost(active_parameters=3e9, flops=9e13)
    found, same = (simulate(one_run(), costs(trainer=each)).rates for each in (given, TrainerCost(per_token=2e-4)))
    assert isclose(found.step_seconds, same.step_seconds)


def test_prompts_are_computed_once_for_a_group_and_again_when_kept_values_are_not() -> None:
    engine = EngineCost(step=Affine(seconds=0.01), per_prefilled_token=0.001)
    profile = costs(engine=engine, prompt_tokens=50)
    assert isclose(simulate(one_run(steps=1), profile).rates.step_seconds, 2 * 50 * 0.001 + 1.0)
    run = one_run(steps=4, staleness=1)
    again = msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, on_update="recompute"))
    assert simulate(again, profile).rates.seconds > simulate(run, profile).rates.seconds


def test_reward_workers_are_a_queue() -> None:
    slow = costs(reward=RewardCost(gather=0.1, seconds=1.0, latency=0.2))
    assert isclose(simulate(one_run(steps=1), slow).rates.step_seconds, 1.4 + 0.1 + 4 * 1.0 + 0.2)


def test_recorded_groups_come_in_their_order_again_and_again() -> None:
    recorded = Profile(lengths=Recorded(groups=tuple((n, n + 1) for n in range(1, 8))))
    answers = Answers(recorded, seed=3, group_size=2, max_tokens=6)
    assert [answers.of(group)[0] for group in (0, 4, 6, 7, 2000)] == [[1, 2], [5, 6], [6, 6], [1, 2], [6, 6]]
    larger = Answers(recorded, seed=3, group_size=5, max_tokens=99)
    assert set(larger.of(8)[0]) <= {2, 3}


def test_groups_past_their_deadline_are_dropped_and_replaced() -> None:
    lengths = Recorded(groups=((10, 10), (10, 1000)))
    run = one_run(steps=4, groups=4, take=4)
    run = msgspec.structs.replace(run, flow=msgspec.structs.replace(run.flow, group_timeout_s=2.0))
    simulation = Simulation(
        run, costs(lengths=lengths, engine=EngineCost(step=Affine(seconds=0.01))), engines=2, trainer_gpus=1, warm_up=0
    )
    found = simulation.run()
    assert found.dropped["timeout"] > 0
    assert found.waste["timeout"] > 0
    assert simulation.buffer.ledger().balanced


def test_groups_that_teach_nothing_cost_nothing_or_are_replaced() -> None:
    trainer = TrainerCost(per_token=0.01)
    nothing = simulate(one_run(), costs(informative=0.0, trainer=trainer))
    assert isclose(nothing.rates.step_seconds, 1.4)
    half = simulate(one_run(steps=10, algorithm=Dapo()), costs(informative=0.5))
    assert half.dropped["uninformative"] > 0


def test_rarer_publications_follow_from_the_controller() -> None:
    """Nothing drifts, so the controller loosens up to four steps a publication, one rung after a while."""
    run = msgspec.structs.replace(one_run(steps=60, staleness=4), staleness=EssBand(window=1, publish_every_max=4))
    found = simulate(run, costs(trainer=TrainerCost(per_step=1.0)))
    assert 60 / 4 < found.publications < 40
    drifting = simulate(run, costs(trainer=TrainerCost(per_step=1.0), kl_per_version=1.0))
    assert drifting.publications > 50
    assert drifting.rates.staleness_mean < found.rates.staleness_mean


def test_an_elastic_pool_grows_where_the_trainer_waits() -> None:
    pool = Elastic(min=1, max=8, interval_s=5.0, cooldown_s=10.0)
    run = one_run(steps=60, staleness=3, groups=8, size=8, elastic=pool)
    engine = EngineCost(step=Affine(seconds=0.05), max_batch=8, join_seconds=7.0)
    found = simulate(run, costs(engine=engine, trainer=TrainerCost(per_step=1.0)))
    assert found.engines > 1
    assert found.resizes
    assert "1 -> 2 engines" in found.resizes[0]
    assert (
        found.rates.seconds
        < simulate(msgspec.structs.replace(run, elastic=Elastic()), costs(engine=engine)).rates.seconds
    )


def test_a_split_is_a_run_of_so_many_engines() -> None:
    """How many groups are kept ready depends on the places of all engines, not of one."""
    run = one_run(steps=10, staleness=4, groups=64, size=2, take=64, ready="auto")
    run = msgspec.structs.replace(run, engine=FakeEngine(max_batch=4))
    profile = costs(trainer=TrainerCost(per_step=0.1), engine=EngineCost(step=Affine(seconds=0.01), max_batch=4))
    configured = msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, replicas=32))
    assert simulate(run, profile, engines=32, warm_up=6) == simulate(configured, profile, warm_up=6)


def test_memory_of_the_buffer_bounds_admission() -> None:
    run = one_run(steps=3, staleness=4)
    tight = msgspec.structs.replace(run, buffer=Buffer(max_bytes=3 * 2 * (12 * 10_000 + 2048)))
    assert simulate(tight, costs()).short_of_memory
    assert not simulate(run, costs()).short_of_memory
    with pytest.raises(ConfigError, match=r"buffer\.max_bytes=1 cannot hold one step"):
        simulate(msgspec.structs.replace(run, buffer=Buffer(max_bytes=1)), costs())


def test_an_engine_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"profile\.engine\.step takes no time"):
        simulate(one_run(), Profile())


# -- whatever the costs are ------------------------------------------------------------------------------------------

SECONDS = st.floats(0.0, 3.0)
PROFILES = st.builds(
    Profile,
    lengths=st.builds(LogNormal, median=st.floats(1, 200), sigma=st.floats(0, 1.5), between=st.floats(0, 1)),
    prompt_tokens=st.integers(0, 50),
    engine=st.builds(
        EngineCost,
        max_batch=st.integers(1, 12),
        step=st.builds(Affine, seconds=st.floats(0.001, 0.1), per_row=st.floats(0, 0.01)),
        per_context_token=st.floats(0, 1e-4),
        per_prefilled_token=st.floats(0, 1e-3),
        speculation=st.builds(
            Speculation, accepted=st.floats(1, 4), cost=st.floats(1, 3), up_to_batch=st.integers(0, 8)
        ),
        begin_seconds=SECONDS,
        join_seconds=SECONDS,
    ),
    trainer=st.builds(
        TrainerCost, per_token=st.floats(0, 0.01), per_take=SECONDS, per_step=SECONDS, per_ask=st.floats(0, 0.5)
    ),
    sync=SECONDS.flatmap(lambda s: st.builds(SyncCost, seconds=st.just(s), pause=st.floats(0, s))),
    reward=st.builds(RewardCost, gather=st.none() | SECONDS, seconds=st.floats(0, 0.1), latency=SECONDS),
    sharing=st.builds(Sharing, trainer=st.floats(0, 2), engine=st.floats(0, 2)),
    informative=st.floats(0.3, 1.0),
    kl_per_version=st.floats(0.0, 0.1),
)
RUNS = st.builds(
    lambda staleness, groups, size, take, band, elastic, recompute, dynamic, seed: msgspec.structs.replace(
        one_run(
            steps=6, staleness=staleness, groups=groups, size=size, take=min(take, groups), elastic=elastic, seed=seed
        ),
        **({"staleness": EssBand(window=1)} if band else {}),
        **({"algorithm": Dapo()} if dynamic and size > 1 else {}),
        rollout=Rollout(group_size=size, max_tokens=300, on_update="recompute" if recompute else "keep"),
    ),
    *(st.integers(0, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.booleans()),
    st.sampled_from([Elastic(), Elastic(max=4, interval_s=1.0, cooldown_s=2.0, window=1)]),
    *(st.booleans(), st.booleans(), st.integers(0, 99)),
)


@settings(max_examples=60, deadline=None)
@given(run=RUNS, profile=PROFILES, engines=st.integers(1, 4))
def test_nothing_is_lost_and_nothing_too_old(run: Run, profile: Profile, engines: int) -> None:
    simulation = Simulation(run, profile, engines=engines, trainer_gpus=1, warm_up=0)
    found = simulation.run()
    ledger = simulation.buffer.ledger()
    assert ledger.balanced
    assert ledger.consumed == run.steps * run.samples_per_step
    assert found.rates.staleness_max <= run.max_staleness
    assert 0 <= found.rates.trainer_wait <= 1
    assert 0 <= found.rates.rollout_idle <= 1
    assert found.rates.batch_mean <= profile.engine.max_batch + 1e-9


@settings(max_examples=20, deadline=None)
@given(run=RUNS, profile=PROFILES)
def test_the_same_seed_gives_the_same_run(run: Run, profile: Profile) -> None:
    def outcome() -> Outcome:
        return simulate(run, profile, engines=2)

    assert outcome() == outcome()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 3))
def test_more_engines_are_no_slower_where_rollouts_are_the_bottleneck(engines: int, sigma: float, seed: int) -> None:
    run = one_run(steps=8, staleness=2, groups=12, size=2, take=2, seed=seed)
    profile = costs(
        lengths=LogNormal(median=100, sigma=sigma), engine=EngineCost(step=Affine(per_row=0.01), max_batch=8)
    )
    fewer, more = (simulate(run, profile, engines=n).rates.samples_per_second for n in (engines, 2 * engines))
    assert more >= fewer * 0.999
