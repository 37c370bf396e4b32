"""The staleness controller: its ladder, its reactions, and where it comes to rest."""

from math import exp, inf, nan

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import load
from asyncrl.config.staleness import EssBand, FixedStaleness, KlBand, StalenessControl
from asyncrl.errors import ConfigError
from asyncrl.fleet.staleness import Decision, StalenessController

SIGNALS = st.floats(0, 1)
BANDS = st.builds(EssBand, window=st.integers(1, 4), publish_every_max=st.integers(1, 6)) | st.builds(
    KlBand, window=st.integers(1, 4), publish_every_max=st.integers(1, 6)
)


def figures(value: float) -> dict[str, float]:
    return {"ess": value, "mismatch_kl": value}


def looseness(decision: Decision) -> int:
    """The rung: both members grow along the ladder, one at a time."""
    return decision.effective_staleness + decision.publish_every - 1


def run(control: StalenessControl, max_staleness: int, values: list[float]) -> list[Decision]:
    controller = StalenessController(control, max_staleness)
    return [controller.observe(figures(value)) for value in values]


def test_fixed_never_moves() -> None:
    assert run(FixedStaleness(), 3, [0.0, 0.5, 1.0, nan]) == [(3, 1)] * 4
    assert run(FixedStaleness(), 0, [0.0]) == [(0, 1)]


def test_it_begins_at_the_fixed_bound_and_climbs_to_rarer_publications() -> None:
    band = EssBand(window=1, publish_every_max=9)
    assert StalenessController(band, 3).decision == (3, 1)
    # One rung, then three steps until what was admitted before has been trained.
    climbed = run(band, 3, [0.99] * 9)
    assert climbed == [(3, 2)] * 4 + [(3, 3)] * 5, "never rarer than the bound, whatever publish_every_max says"
    assert run(EssBand(window=1, publish_every_max=2), 3, [0.99] * 9)[-1] == (3, 2)


def test_a_low_ess_comes_down_rung_by_rung_and_inside_the_band_it_stays() -> None:
    low = [0.5] * 6
    assert run(EssBand(window=1), 2, [*low, 0.95, 0.95, 0.95]) == [
        *[(1, 1)] * 3,  # a move, and the two steps of the old bound
        *[(0, 1)] * 2,  # a move, and the one step of the old bound
        *[(0, 1)] * 4,  # there is no rung below; then inside the band
    ]
    assert run(EssBand(window=1), 2, [0.90, 0.97, 0.93] * 5) == [(2, 1)] * 15, "both edges belong to the band"


def test_the_median_of_a_window_is_judged_so_that_one_spike_moves_nothing() -> None:
    assert run(EssBand(window=3), 1, [0.95, 0.01, 0.95, 0.93, 0.01]) == [(1, 1)] * 5
    # Of 0.5, 0.95 and 0.8 two are below the band; the next step is left out, and a window begins anew.
    low_then_high = [0.95, 0.5, 0.95, 0.8, 1.0, 1.0, 1.0, 1.0]
    assert run(EssBand(window=3), 1, low_then_high) == [(1, 1)] * 3 + [(0, 1)] * 4 + [(1, 1)]


def test_kl_is_the_other_way_round() -> None:
    assert run(KlBand(window=1), 1, [0.06]) == [(0, 1)]
    assert run(KlBand(window=1), 2, [0.01]) == [(2, 2)]
    assert run(KlBand(window=1), 2, [0.015, 0.05, 0.03]) == [(2, 1)] * 3
    assert run(KlBand(window=1), 2, [-0.001]) == [(2, 2)], "an estimate of nearly zero may be negative"


@pytest.mark.parametrize("worst", [nan, inf])
def test_a_figure_that_is_not_finite_tightens(worst: float) -> None:
    assert run(EssBand(window=2), 1, [0.99, worst])[-1] == (0, 1)
    assert run(KlBand(window=2), 1, [0.0, worst])[-1] == (0, 1)


@pytest.mark.parametrize("band", [EssBand(window=2), KlBand(window=2)])
def test_a_step_with_nothing_measured_says_nothing(band: StalenessControl) -> None:
    controller = StalenessController(band, 2)
    nothing = {"ess": 1.0, "mismatch_kl": 0.0, "measured_tokens": 0.0}
    assert [controller.observe(nothing) for _ in range(6)] == [(2, 1)] * 6, "not even that all is on-policy"
    off_policy = {"ess": 0.5, "mismatch_kl": 0.5, "measured_tokens": 9.0}
    assert [controller.observe(each) for each in (off_policy, nothing, off_policy)] == [(2, 1), (2, 1), (1, 1)]
    assert [controller.observe(nothing) for _ in range(2)] == [(1, 1)] * 2, "groups of the old bound pass by"
    assert [controller.observe(off_policy) for _ in range(2)] == [(1, 1), (0, 1)]


def test_the_bound_of_a_synchronous_run_has_nothing_to_move() -> None:
    assert set(run(EssBand(window=1), 0, [1.0, 0.0, 1.0])) == {(0, 1)}


@settings(deadline=None)
@given(band=BANDS, max_staleness=st.integers(0, 6), values=st.lists(SIGNALS | st.just(nan) | st.just(inf), max_size=60))
def test_it_never_leaves_its_limits_and_moves_one_rung_at_a_time(
    band: EssBand | KlBand, max_staleness: int, values: list[float]
) -> None:
    before = max_staleness
    for decision in run(band, max_staleness, values):
        effective, every = decision
        assert 0 <= effective <= max_staleness
        assert 1 <= every <= max(1, min(band.publish_every_max, effective)), (
            "training would outrun the published version"
        )
        assert abs(looseness(decision) - before) <= 1
        before = looseness(decision)


@settings(deadline=None)
@given(
    band=BANDS,
    max_staleness=st.integers(0, 6),
    past=st.lists(SIGNALS, max_size=40),
    pair=st.tuples(SIGNALS, SIGNALS).map(sorted),
)
def test_a_better_figure_never_tightens_more(
    band: EssBand | KlBand, max_staleness: int, past: list[float], pair: list[float]
) -> None:
    small, large = (looseness(run(band, max_staleness, [*past, value])[-1]) for value in pair)
    assert small <= large if isinstance(band, EssBand) else small >= large


@settings(deadline=None)
@given(band=BANDS, max_staleness=st.integers(1, 6), past=st.lists(SIGNALS, max_size=40))
def test_enough_steps_on_one_side_reach_the_end_of_the_ladder(
    band: EssBand | KlBand, max_staleness: int, past: list[float]
) -> None:
    # A rung takes a window and the settling; the ladder has at most 2 * 6 rungs.
    many = 12 * (band.window + 7)
    bottom, top = run(band, max_staleness, past + [0.0] * many)[-1], run(band, max_staleness, past + [1.0] * many)[-1]
    if isinstance(band, KlBand):
        bottom, top = top, bottom
    assert bottom == (0, 1)
    assert top == (max_staleness, max(1, min(band.publish_every_max, max_staleness)))


@settings(deadline=None)
@given(
    decay=st.floats(0.002, 0.05),
    max_staleness=st.integers(1, 8),
    window=st.integers(1, 4),
    noise=st.lists(st.floats(-0.004, 0.004), min_size=400, max_size=400),
)
def test_it_comes_to_rest_where_ess_falls_with_staleness(
    decay: float, max_staleness: int, window: int, noise: list[float]
) -> None:
    """The plant: ESS = exp(-decay * age), where a changed bound is felt after as many steps as it is wide.

    One rung of this plant is narrower than the band, so a rung inside exists, or the ladder ends before it. Where noise
    reaches over the edge of the band, the neighbour of that rung serves as well.
    """
    controller = StalenessController(EssBand(window=window), max_staleness)
    ages = [looseness(controller.decision)] * (max_staleness + 1)
    rungs: list[int] = []
    for step in range(400):
        felt = ages[-1 - min(ages[-1], max_staleness)]
        ages.append(looseness(controller.observe({"ess": exp(-decay * felt) + noise[step]})))
        rungs.append(ages[-1])
    assert max(rungs[200:]) - min(rungs[200:]) <= 1, rungs[200:]
    final, last = exp(-decay * rungs[-1]), max_staleness + min(4, max_staleness) - 1
    assert 0.896 <= final <= 0.974 or (rungs[-1] == last and final > 0.97)


def test_one_line_of_config_turns_it_on_and_a_wrong_band_is_refused() -> None:
    assert load({}).staleness == FixedStaleness()
    assert load({"staleness": {"type": "ess"}}).staleness == EssBand(low=0.90, high=0.97)
    run = load({"staleness": {"type": "kl", "low": 0.001, "high": 0.002}})
    assert load(msgspec.to_builtins(run)) == run
    with pytest.raises(ConfigError, match=r"staleness.*low=0.98 must be below high=0.97"):
        load({"staleness": {"type": "ess", "low": 0.98}})


def test_dynamic_sampling_of_single_samples_is_refused() -> None:
    raw = {"algorithm": {"type": "ppo", "dynamic_sampling": True}, "rollout": {"group_size": 1}}
    with pytest.raises(ConfigError, match=r"rollout.group_size=1 that is every group: raise rollout.group_size"):
        load(raw)
