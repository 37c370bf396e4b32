"""Fleet state: who may generate, who is published to, and which version each engine holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.fleet.state import FleetState
from asyncrl.types import WeightManifest

NAMES = ("a", "b")


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, tensors=(), total_bytes=0, digest="", location="")


def fleet(*names: str, max_restarts: int = 1) -> FleetState[str]:
    return FleetState({name: f"handle of {name}" for name in names}, max_restarts)


def publish(state: FleetState[str], version: int) -> None:
    """To everybody who takes part, without trouble."""
    for name in state.participants:
        state.acknowledged(name, version)
    state.published(manifest(version))


def test_the_way_back() -> None:
    state = fleet(*NAMES)
    publish(state, 3)
    assert state.died("a")
    assert not state.died("a"), "somebody brings it back already"
    assert (state.serving, state.reachable, state.version_of("a")) == (("b",), ("b",), None)
    state.acknowledged("a", 4)
    assert state.version_of("a") is None, "what a dead process said last does not count"
    state.restarted("a")
    assert (state.serving, state.participants, state.reachable) == (("b",), ("b",), NAMES)
    state.include("a")
    state.acknowledged("a", 2)
    assert state.serving == ("b",), "older than the published version"
    state.acknowledged("a", 3)
    assert state.serving == NAMES
    assert not state.died("a"), "the one restart is used up"
    assert (state.reachable, state.members, state.restarts) == (("b",), NAMES, {"a": 2, "b": 0})
    assert state.hopeful
    assert state.died("b")
    state.gave_up("b")
    assert not state.hopeful


def test_one_that_joins_serves_only_under_the_published_version_and_one_that_leaves_is_no_member() -> None:
    state = fleet("a")
    publish(state, 4)
    state.join("b")
    assert (state.serving, state.reachable, state.members) == (("a",), ("a",), NAMES), "it is not even placed"
    assert set(state.handles) == {"a"}
    assert not state.died("b"), "whoever starts it sees to that"
    state.acknowledged("b", 4)
    assert state.version_of("b") is None, "it was not started"
    with pytest.raises(ValueError, match="b is joining: no version can be published to it"):
        state.include("b")
    state.started("b", "handle of b")
    state.include("b")
    state.acknowledged("b", 3)
    assert (state.serving, state.participants, state.reachable) == (("a",), NAMES, NAMES)
    state.acknowledged("b", 4)
    assert state.serving == NAMES
    state.drain("b")
    assert (state.serving, state.participants) == (("a",), NAMES), "it gets weights until it has left"
    assert state.leave("b") == "handle of b"
    assert state.members == state.participants == ("a",)
    state.gave_up("b")
    state.restarted("b")
    state.acknowledged("b", 5)
    state.left_behind("b", hung=True)
    assert not state.died("b"), "what is said of it later changes nothing"
    assert state.members == ("a",)
    state.drain("a")
    assert not state.hopeful


def test_one_that_dies_while_it_drains_is_not_brought_back() -> None:
    state = fleet(*NAMES)
    state.drain("a")
    assert not state.died("a"), "nobody needs it"
    assert (state.in_state("gone"), state.reachable, state.restarts["a"]) == (("a",), ("b",), 0)


def test_a_version_that_is_under_way_makes_nobody_serve() -> None:
    state = fleet(*NAMES)
    state.died("a")
    state.restarted("a")
    state.include("a")
    state.acknowledged("a", 7)
    assert (state.serving, state.version_of("a"), state.published_version) == (("b",), 7, 0)
    state.acknowledged("b", 7)
    assert state.serving == ("b",), "one that serves goes on under the version that it was given"
    state.published(manifest(7))
    assert (state.serving, state.published_version) == (NAMES, 7)


def test_one_that_died_after_it_had_acknowledged_does_not_serve_when_the_version_counts() -> None:
    """It may be back before the others have acknowledged, with the weights that the run began with."""
    state = fleet(*NAMES)
    state.acknowledged("a", 7)
    state.died("a")
    state.restarted("a")
    state.acknowledged("b", 7)
    state.published(manifest(7))
    assert (state.serving, state.in_state("stale"), state.hung) == (("b",), ("a",), ())


def test_one_that_a_publication_goes_on_without_serves_no_more_and_only_a_living_one_hangs() -> None:
    state = fleet("a", "b", "c", "d")
    state.drain("d")
    state.left_behind("a", hung=True)
    state.left_behind("b", hung=False)
    state.left_behind("d", hung=True)
    assert (state.serving, state.participants, state.hung) == (("c",), ("c",), ("a", "d"))
    assert state.reachable == ("a", "b", "c", "d"), "it may be asked again"
    state.include("a")
    assert (state.hung, state.serving) == (("d",), ("c",))
    assert state.died("a")
    assert not state.died("d")
    assert state.hung == ()


def test_one_left_behind_after_it_had_acknowledged_does_not_serve_when_the_version_counts() -> None:
    state = fleet(*NAMES)
    state.acknowledged("a", 7)
    state.left_behind("a", hung=False)
    state.acknowledged("b", 7)
    state.published(manifest(7))
    assert (state.serving, state.participants) == (("b",), ("b",))


def test_a_change_of_processes_is_counted_once() -> None:
    state = fleet(*NAMES)
    state.include("a")
    assert state.membership_changes == 0, "it took part already"
    state.died("a")
    state.restarted("a")
    assert state.membership_changes == 1
    state.include("a")
    assert state.membership_changes == 2, "the same name, but another process"
    state.left_behind("a", hung=True)
    state.left_behind("a", hung=True)
    state.leave("a")
    assert state.membership_changes == 3
    state.leave("b")
    assert state.membership_changes == 4


def test_a_name_is_used_once() -> None:
    state = fleet("a")
    with pytest.raises(ValueError, match="a is or was here already"):
        state.join("a")
    state.leave("a")
    with pytest.raises(ValueError, match="a is or was here already"):
        state.join("a")


def test_versions_do_not_go_back() -> None:
    state = fleet("a")
    publish(state, 7)
    with pytest.raises(ValueError, match="version 6 is older than 7"):
        state.published(manifest(6))


def test_what_cannot_be_is_refused() -> None:
    state = fleet("a")
    with pytest.raises(ValueError, match="a is healthy: only an engine that joins is started"):
        state.started("a", "again")
    state.died("a")
    with pytest.raises(ValueError, match="a is restarting: only an engine that serves is drained"):
        state.drain("a")


class AnyOrder(RuleBasedStateMachine):
    """Engines that do anything at any time. What each process was really given is kept here, beside the state."""

    @initialize(count=st.integers(1, 3), max_restarts=st.integers(0, 2))
    def start(self, count: int, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.next_name = count
        self.state = fleet(*(f"e{number}" for number in range(count)), max_restarts=max_restarts)
        self.holds: dict[str, int] = dict.fromkeys(self.state.members, 0)
        """By living process."""
        self.best: dict[str, int] = dict.fromkeys(self.state.members, 0)
        """The newest published version that each engine ever served."""
        self.was_published = 0
        self.left: set[str] = set()

    def _name(self, index: int) -> str:
        """Also of engines that left, or have not come yet."""
        return f"e{index % (self.next_name + 1)}"

    @rule()
    def join(self) -> None:
        self.state.join(f"e{self.next_name}")
        self.next_name += 1

    @rule(index=st.integers(0, 9))
    def started(self, index: int) -> None:
        if (name := self._name(index)) in self.state.in_state("joining"):
            self.state.started(name, "handle")

    @rule(index=st.integers(0, 9))
    def drain(self, index: int) -> None:
        if (name := self._name(index)) in self.state.serving:
            self.state.drain(name)

    @rule(index=st.integers(0, 9))
    def leave(self, index: int) -> None:
        if (name := self._name(index)) in self.state.members:
            self.state.leave(name)
            self.left.add(name)

    @rule(index=st.integers(0, 9))
    def died(self, index: int) -> None:
        name = self._name(index)
        self.holds.pop(name, None)
        brought_back = self.state.died(name)
        assert brought_back <= (name in self.state.in_state("restarting"))

    @rule(index=st.integers(0, 9))
    def restarted(self, index: int) -> None:
        self.state.restarted(self._name(index))

    @rule(index=st.integers(0, 9))
    def gave_up(self, index: int) -> None:
        self.state.gave_up(self._name(index))

    @rule(index=st.integers(0, 9))
    def include(self, index: int) -> None:
        if (name := self._name(index)) in self.state.reachable:
            self.state.include(name)

    @rule(index=st.integers(0, 9), hung=st.booleans())
    def left_behind(self, index: int, hung: bool) -> None:
        self.state.left_behind(self._name(index), hung=hung)

    @rule(index=st.integers(0, 9), ahead=st.integers(-1, 2))
    def acknowledged(self, index: int, ahead: int) -> None:
        name, version = self._name(index), self.state.published_version + ahead
        if name in self.state.participants:  # a dead process may say so too, but holds nothing
            self.holds[name] = max(version, self.holds.get(name, 0))
        self.state.acknowledged(name, version)

    @precondition(lambda self: self.state.participants)
    @rule(ahead=st.integers(0, 2))
    def published(self, ahead: int) -> None:
        """As Epochs does it: everybody who takes part has acknowledged, or just died."""
        version = self.state.published_version + ahead
        for name in self.state.participants:
            self.state.acknowledged(name, version)
            self.holds[name] = max(version, self.holds.get(name, 0))
        self.state.published(manifest(version))

    @rule(ahead=st.integers(1, 2))
    def published_without_all(self, ahead: int) -> None:
        """One that took part during the publication, and was not asked."""
        self.state.published(manifest(self.state.published_version + ahead))

    @invariant()
    def each_group_is_part_of_the_next(self) -> None:
        state = self.state
        assert set(state.serving) <= set(state.participants) <= set(state.reachable) <= set(state.members)
        assert set(state.hung) <= set(state.reachable) - set(state.participants)
        assert set(state.participants) <= set(state.handles)

    @invariant()
    def who_serves_holds_the_published_version_or_the_next_one(self) -> None:
        for name in self.state.serving:
            assert self.holds[name] >= self.state.published_version
            assert self.state.version_of(name) == self.holds[name]
            assert self.state.restarts[name] <= self.max_restarts

    @invariant()
    def nobody_serves_a_version_older_than_it_served_before(self) -> None:
        for name in self.state.serving:
            assert self.holds[name] >= self.best.get(name, 0)
            self.best[name] = max(self.best.get(name, 0), self.state.published_version)

    @invariant()
    def the_published_version_never_goes_back(self) -> None:
        assert self.state.published_version >= self.was_published
        self.was_published = self.state.published_version

    @invariant()
    def who_left_never_returns(self) -> None:
        assert not self.left & set(self.state.members)
        for name in self.left:
            with pytest.raises(ValueError, match="is or was here already"):
                self.state.join(name)


AnyOrder.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
