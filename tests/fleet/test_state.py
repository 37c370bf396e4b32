"""Fleet health: an engine that comes back serves only after a refit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.fleet.state import FleetHealth

NAMES = ("a", "b")


def test_the_way_back() -> None:
    health = FleetHealth(NAMES, max_restarts=1)
    health.acknowledged("a", 3)
    assert health.died("a")
    assert not health.died("a"), "somebody brings it back already"
    assert health.serving == ("b",)
    health.acknowledged("a", 4)
    assert health.serving == ("b",), "what a dead process said last does not count"
    health.started("a")
    assert (health.serving, health.reachable) == (("b",), NAMES)
    health.acknowledged("a", 2)
    assert health.serving == ("b",), "older than what it served before"
    health.acknowledged("a", 3)
    assert health.serving == NAMES
    assert not health.died("a"), "the one restart is used up"
    assert health.reachable == ("b",)
    assert health.hopeful
    assert health.died("b")
    health.gave_up("b")
    assert not health.hopeful


def test_one_that_joins_serves_only_under_the_current_version_and_one_that_leaves_is_forgotten() -> None:
    health = FleetHealth(("a",), max_restarts=1)
    health.join("b", version=4)
    assert (health.serving, health.reachable) == (("a",), ("a",)), "it is not even placed"
    assert not health.died("b"), "whoever starts it sees to that"
    health.acknowledged("b", 4)
    assert health.serving == ("a",), "it was not started"
    health.started("b")
    health.acknowledged("b", 3)
    assert (health.serving, health.reachable) == (("a",), ("a", "b"))
    health.acknowledged("b", 4)
    assert health.serving == ("a", "b")
    health.drain("b")
    assert (health.serving, health.reachable) == (("a",), ("a", "b")), "it gets weights until it has left"
    assert not health.died("b"), "nobody needs it"
    health.left("b")
    assert health.reachable == ("a",)
    health.gave_up("b")
    health.started("b")
    assert not health.died("b"), "what is said of it later changes nothing"
    health.drain("a")
    assert not health.hopeful


def test_a_name_is_used_once() -> None:
    with pytest.raises(ValueError, match="a is or was here already"):
        FleetHealth(("a",), max_restarts=1).join("a", 0)


EVENTS = st.tuples(st.sampled_from(["died", "started", "gave_up", "acknowledged"]), st.sampled_from(NAMES))


@given(st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=40), st.integers(0, 2))
def test_nobody_serves_under_weights_older_than_it_has_acknowledged(
    events: list[tuple[tuple[str, str], int]], restarts: int
) -> None:
    health = FleetHealth(NAMES, restarts)
    best = dict.fromkeys(NAMES, 0)
    fresh = dict.fromkeys(NAMES, True)
    for (event, name), version in events:
        if event == "acknowledged":
            health.acknowledged(name, version)
            if version >= best[name]:
                fresh[name] = fresh[name] or health.replicas[name].state == "healthy"
        else:
            getattr(health, event)(name)
            fresh[name] = fresh[name] and event != "died"
        best = {each: max(best[each], health.replicas[each].version) for each in NAMES}
        for each in health.serving:
            assert fresh[each], "it died and was not refitted"
            assert health.replicas[each].version == best[each]
            assert health.replicas[each].restarts <= restarts
