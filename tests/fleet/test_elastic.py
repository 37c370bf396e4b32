"""The elastic pool's decisions: hand-computed moves, and a plant of engines and a trainer that it has to balance."""

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import load
from asyncrl.config.fleet import Elastic
from asyncrl.errors import ConfigError
from asyncrl.fleet.elastic import ElasticPolicy, Measured, Resize, WaitMeter

QUICK = Elastic(max=8, window=1, cooldown_s=0.0, interval_s=1.0)
SHARES = st.floats(0, 1)
MEASURED = st.builds(Measured, SHARES, SHARES, st.floats(0, 4))


def decide(settings: Elastic, size: int, *seen: Measured) -> Resize | None:
    """The last decision, after a first look that only says that the size is reached."""
    policy = ElasticPolicy(settings, size)
    assert policy.observe(0.0, size, seen[0]) is None
    return [policy.observe(float(at), size, each) for at, each in enumerate(seen, start=1)][-1]


def wanted(size: int, trainer: float, rollout: float, queued: float = 0.0, settings: Elastic = QUICK) -> int:
    resize = decide(settings, size, Measured(trainer, rollout, queued))
    return size if resize is None else resize.wanted


@pytest.mark.parametrize(
    ("size", "trainer", "rollout", "expected"),
    [
        (2, 0.5, 0.0, 4),  # 2 / 0.5
        (3, 0.25, 0.0, 4),  # 3 / 0.75
        (1, 0.9, 0.0, 2),  # 10, but at most the double
        (6, 0.5, 0.0, 8),  # 12, but max
        (8, 0.5, 0.0, 8),
        (4, 0.0, 0.5, 2),  # 4 * 0.5
        (4, 0.0, 0.3, 3),  # 2.8, rounded up
        (2, 0.0, 0.4, 2),  # 1.2 needs both
        (8, 0.0, 0.9, 4),  # 0.8, but at most the half
        (1, 0.0, 1.0, 1),
        (4, 0.1, 0.0, 4),  # the edges belong to the dead band
        (4, 0.0, 0.2, 4),
        (4, 0.6, 0.6, 4),  # both wait: one more would wait as well
        (1, 1.0, 0.0, 2),  # the trainer got nothing at all
    ],
)
def test_a_move_goes_to_the_balance(size: int, trainer: float, rollout: float, expected: int) -> None:
    assert wanted(size, trainer, rollout) == expected


def test_a_queue_in_the_engines_makes_growth_easier_and_forbids_to_shrink() -> None:
    assert wanted(4, 0.08, 0.0) == 4
    assert wanted(4, 0.08, 0.0, queued=1.0) == 5
    assert wanted(4, 0.0, 0.5, queued=1.0) == 4
    assert wanted(4, 0.0, 0.0, queued=9.0) == 4, "nobody waits for what is queued"


def test_one_odd_look_moves_nothing() -> None:
    calm, odd = Measured(0.0, 0.0), Measured(0.9, 0.0)
    assert decide(Elastic(max=4, window=3, cooldown_s=0.0), 2, calm, odd, calm) is None
    assert decide(Elastic(max=4, window=3, cooldown_s=0.0), 2, odd, odd, calm) == Resize(
        4, "the trainer waited 90% of the time, engines 0%"
    )


def test_it_waits_for_the_size_and_then_for_the_cool_down() -> None:
    policy = ElasticPolicy(Elastic(max=4, window=1, cooldown_s=10.0), 1)
    hungry = Measured(0.5, 0.0)
    assert [policy.observe(at, 1, hungry) for at in (0.0, 5.0, 9.9)] == [None] * 3
    assert policy.observe(10.0, 1, hungry) is not None
    assert policy.wanted == 2
    assert policy.observe(500.0, 1, hungry) is None, "the second engine is not there yet"
    assert [policy.observe(at, 2, hungry) for at in (510.0, 519.0)] == [None] * 2
    assert policy.observe(520.0, 2, hungry) is not None


def test_each_move_that_is_taken_back_doubles_the_cool_down() -> None:
    policy = ElasticPolicy(Elastic(max=8, window=1, cooldown_s=10.0), 1)
    moved: list[float] = []
    for now in range(200):  # with one engine the trainer seems to starve, with two the engines do
        if policy.observe(float(now), policy.wanted, Measured(0.4, 0) if policy.wanted == 1 else Measured(0, 0.6)):
            moved.append(now)
    # Each time one look that sees the size reached, then 10, 10, 20, 40 and 80 seconds.
    assert moved == [10, 21, 42, 83, 164]


def test_what_the_cluster_cannot_bring_is_asked_for_again_much_later() -> None:
    policy = ElasticPolicy(Elastic(max=4, window=1, cooldown_s=0.0, join_timeout_s=100.0), 2)
    hungry = Measured(0.5, 0.0)
    policy.observe(0.0, 2, hungry)
    assert policy.observe(1.0, 2, hungry) is not None
    policy.refused(50.0, 3)
    assert policy.wanted == 3
    assert [policy.observe(at, 3, hungry) for at in (51.0, 52.0, 149.0)] == [None] * 3
    assert policy.observe(150.0, 3, hungry) == Resize(4, "the trainer waited 50% of the time, engines 0%")


@given(st.lists(st.tuples(MEASURED, st.booleans()), max_size=60), st.integers(1, 3), st.integers(0, 5))
def test_always_within_its_bounds_and_never_more_than_double_or_half(
    looks: list[tuple[Measured, bool]], least: int, more: int
) -> None:
    settings = Elastic(min=least, max=least + more, window=2, cooldown_s=3.0)
    policy = ElasticPolicy(settings, 2)
    size, moved_at = policy.wanted, -3.0
    for now, (measured, arrives) in enumerate(looks):
        resize = policy.observe(float(now), size, measured)
        if resize is not None:
            assert resize.wanted == policy.wanted != size
            assert ceil(size / 2) <= resize.wanted <= 2 * size
            assert now - moved_at >= settings.cooldown_s, "two moves within the cool-down"
            moved_at = now
        assert settings.min <= policy.wanted <= settings.max
        size = policy.wanted if arrives else size


@given(st.floats(0.2, 12.0), st.integers(1, 8), st.floats(0, 0.05))
def test_a_steady_load_is_balanced_and_then_left_alone(load: float, begin: int, noise: float) -> None:
    """`load` engines are what the trainer can use. With n of them, the slower side is busy and the other waits."""
    policy = ElasticPolicy(Elastic(max=8, window=1, cooldown_s=0.0), begin)
    size, sizes = begin, list[int]()
    for now in range(60):
        trainer, rollout = max(0.0, 1 - size / load), max(0.0, 1 - load / size)
        wobble = noise * (-1) ** now
        shares = (min(max(share + wobble, 0.0), 1.0) for share in (trainer, rollout))
        policy.observe(float(now), size, Measured(*shares))
        size = policy.wanted
        sizes.append(size)
    assert len(set(sizes[-20:])) == 1, f"it swings: {sizes}"
    assert sum(a != b for a, b in pairwise(sizes)) <= 5
    if load <= 8:
        assert 1 - size / load <= 0.1 + 2 * noise, "the trainer starves"


def test_the_meter_integrates_what_it_is_told() -> None:
    meter = WaitMeter(now=100.0)
    meter.trainer(102.0, waits=True)
    meter.rollout(103.0, 0.5)
    meter.trainer(105.0, waits=False)
    assert meter.read(110.0) == Measured(0.3, 0.35)
    assert meter.read(114.0, queued=2.0) == Measured(0.0, 0.5, 2.0)
    assert meter.read(114.0) == Measured(0.0, 0.0), "no time has passed"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="min=3 must not be above max=2"):
        load({"elastic": {"min": 3, "max": 2}})
    with pytest.raises(ConfigError, match=r"rollout.replicas=5 is outside of elastic.min=1 .. elastic.max=2"):
        load({"elastic": {"max": 2}, "rollout": {"replicas": 5}})
    assert not load({}).elastic.on
