"""How many groups are kept ready: in numbers, and what it brings in a simulated run."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.config.engine import NativeEngine
from asyncrl.fleet.ready_window import ReadyWindow
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.outcome import Rates
from asyncrl.simulation.profile import Affine, EngineCost, LogNormal, Profile, RewardCost, SyncCost, TrainerCost


def _run(ready: int | str = "auto", max_staleness: int = 2) -> Run:
    flow = Flow(groups_per_step=32, groups_per_take=4, max_ready_groups=ready, group_timeout_s=1e6)  # pyright: ignore[reportArgumentType]
    return Run(
        steps=120,
        max_staleness=max_staleness,
        rollout=Rollout(group_size=8, max_tokens=1000),
        engine=NativeEngine(max_batch=512),
        flow=flow,
        buffer=Buffer(max_bytes=1 << 40),
    )


def test_in_numbers() -> None:
    window = ReadyWindow(_run())
    assert window.groups == 32
    assert window.observe(0.9, 0.9) == 32, "the first step waits for the first groups"
    assert window.observe(0.51, 0.51) == 48
    assert window.observe(0.0, 0.0) == 48, "lately it lacked 0.08 of a step"
    assert window.observe(0.61, 0.0) == 64, "stragglers took six tenths: one is tolerated, and 0.01 is little"
    assert window.observe(1.0, 1.0) == 64, "two steps at most"


def test_waits_for_stragglers_are_tolerated_up_to_a_tenth() -> None:
    window = ReadyWindow(_run())
    window.observe(0.0, 0.0)
    assert [window.observe(0.1, 0.0) for _ in range(3)] == [30, 29, 27]  # 32 * (15 / 16) ** n


def test_a_trainer_that_never_waits_has_half_a_step_in_front_of_it() -> None:
    window = ReadyWindow(_run(max_staleness=8))
    assert [window.observe(0.0, 0.0) for _ in range(20)][-1] == 16


@pytest.mark.parametrize(("places", "most"), [(512, 64), (128, 32 + 128 // 8)])
def test_no_more_than_two_steps_or_than_engines_have_places_for_beside_one(places: int, most: int) -> None:
    window = ReadyWindow(msgspec.structs.replace(_run(max_staleness=8), engine=NativeEngine(max_batch=places)))
    assert [window.observe(1.0, 1.0) for _ in range(20)][-1] == most


@pytest.mark.parametrize("ready", [0, 5, 200])
def test_a_number_stays(ready: int) -> None:
    window = ReadyWindow(_run(ready))
    assert {window.groups, *(window.observe(lacked, lacked) for lacked in (1.0, 1.0, 0.0))} == {ready}


def test_a_synchronous_step_is_admitted_as_a_whole() -> None:
    assert ReadyWindow(_run(max_staleness=0)).groups == 0
    assert ReadyWindow(_run(40, max_staleness=0)).groups == 40


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60), st.integers(1, 8))
def test_it_stays_between_half_a_step_and_the_bound(waits: list[tuple[float, float]], max_staleness: int) -> None:
    window = ReadyWindow(_run(max_staleness=max_staleness))
    for waited, starved in waits:
        assert 16 <= window.observe(max(waited, starved), starved) <= 64


def _simulated(ready: int | str, max_staleness: int, per_token: float) -> Rates:
    profile = Profile(
        lengths=LogNormal(median=40, sigma=1.3, between=0.5),
        engine=EngineCost(step=Affine(seconds=0.003, per_row=2e-6), max_batch=512),
        reward=RewardCost(gather=0.0),
        trainer=TrainerCost(per_token=per_token, per_take=0.003, per_step=0.02),
        sync=SyncCost(seconds=0.05),
    )
    return simulate(_run(ready, max_staleness), profile, warm_up=40).rates


@pytest.mark.parametrize("max_staleness", [2, 8])
def test_samples_of_a_slow_trainer_are_fresh_and_it_is_hardly_slower(max_staleness: int) -> None:
    wide, auto = (_simulated(ready, max_staleness, per_token=8e-5) for ready in (0, "auto"))
    assert wide.staleness_mean == pytest.approx(max_staleness, abs=0.1)
    assert auto.staleness_mean < 1.3
    assert auto.samples_per_second > 0.96 * wide.samples_per_second


def test_slow_engines_are_given_all_that_the_bound_allows() -> None:
    wide, auto = (_simulated(ready, 2, per_token=1e-6) for ready in (0, "auto"))
    assert auto.samples_per_second > 0.97 * wide.samples_per_second
