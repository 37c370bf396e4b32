"""The rules of a publication: who counts, who is waited for, and for how long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.fleet.state import FleetState
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.epochs import ATTEMPTS, Abort, Action, Deliver, Epochs, GiveUp, Send

DEADLINE, GRACE, EXPORT = 10.0, 2.0, 30.0


def _epochs(*members: str, required: int | None = None) -> Epochs:
    fleet = FleetState(dict.fromkeys(members, "handle"), max_restarts=9)
    return Epochs(fleet, DEADLINE, GRACE, len(members) if required is None else required, EXPORT)


def _manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, tensors=(), total_bytes=0, digest="", location="")


def test_a_version_counts_when_every_member_has_acknowledged() -> None:
    epochs = _epochs("a", "b")
    assert epochs.begin(0) == [Send(SendOrder(1, ("a", "b"), dense=False))]
    assert epochs.sent(1, _manifest(7), 1) == []
    assert epochs.acknowledged("a", 1, 2) == []
    assert epochs.fleet.published_version == 0
    assert epochs.acknowledged("b", 1, 3) == [Deliver(7)]
    assert (epochs.fleet.published_version, epochs.state) == (7, "idle")
    assert epochs.begin(4) == [Send(SendOrder(1, ("a", "b"), dense=False))], "the epoch lasts while nothing fails"


def test_a_refusal_ends_the_epoch_and_every_byte_is_sent_in_the_next() -> None:
    epochs = _epochs("a", "b")
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    assert epochs.refused("a", 1, "other base", 1) == [Abort(1, "other base")], "b has not said that it is out"
    assert epochs.refused("b", 1, "aborted", 2) == [Send(SendOrder(2, ("a", "b"), dense=True))]
    epochs.sent(2, _manifest(7), 2)
    assert epochs.acknowledged("b", 1, 3) == [], "of the epoch before"
    assert epochs.acknowledged("b", 2, 3) == []
    assert epochs.acknowledged("a", 2, 3) == [Deliver(7)]


def test_a_lost_member_is_left_behind_where_the_others_are_enough() -> None:
    epochs = _epochs("a", "b", "c", required=1)
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    assert epochs.acknowledged("a", 1, 1) == []
    assert epochs.lost("b", 1, "b died", 1) == [Abort(1, "b died")]
    assert epochs.refused("c", 1, "aborted", 2) == [Send(SendOrder(2, ("a", "c"), dense=True))]
    assert (epochs.fleet.participants, epochs.fleet.hung) == (("a", "c"), ())


def test_a_lost_member_that_is_required_ends_it_at_once() -> None:
    epochs = _epochs("a", "b")
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    assert epochs.lost("b", 1, "b died", 1) == [Abort(1, "b died"), GiveUp(7, "b died")]
    assert epochs.fleet.published_version == 0


def test_who_is_silent_through_deadline_and_grace_hangs() -> None:
    epochs = _epochs("a", "b", required=1)
    epochs.begin(0)
    assert epochs.wake == EXPORT, "a busy trainer is waited for"
    epochs.sent(1, _manifest(7), 20)
    assert epochs.wake == 20 + DEADLINE
    assert epochs.tick(29) == []
    assert epochs.tick(30) == [Abort(1, "no answer from a, b within 10 s")], "over NCCL nobody ends when one hangs"
    assert epochs.refused("a", 1, "aborted", 31) == []
    assert epochs.tick(31.9) == []
    assert epochs.tick(32) == [Send(SendOrder(2, ("a",), dense=True))]
    assert (epochs.fleet.participants, epochs.fleet.hung) == (("a",), ("b",))
    epochs.sent(2, _manifest(7), 33)
    assert epochs.acknowledged("b", 1, 34) == [], "it has woken up, too late"
    assert epochs.acknowledged("a", 2, 34) == [Deliver(7)]
    assert (epochs.fleet.serving, epochs.fleet.version_of("b")) == (("a",), 0)


def test_the_second_failure_is_the_last() -> None:
    epochs = _epochs("a")
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    assert epochs.refused("a", 1, "bucket 3", 1) == [Abort(1, "bucket 3"), Send(SendOrder(2, ("a",), dense=True))]
    epochs.sent(2, _manifest(7), 1)
    assert epochs.refused("a", 2, "probe", 2) == [Abort(2, "probe"), GiveUp(7, "bucket 3; probe")]
    assert epochs.begin(3) == [Send(SendOrder(3, ("a",), dense=False))], "another version may fare better"


def test_a_trainer_that_puts_nothing_out_is_not_waited_for_forever() -> None:
    epochs = _epochs("a")
    epochs.begin(0)
    said = "the trainer put no version out within 30 s"
    assert epochs.tick(EXPORT) == [Abort(1, said), Send(SendOrder(2, ("a",), dense=True))]
    assert epochs.tick(2 * EXPORT) == [Abort(2, said), GiveUp(None, f"{said}; {said}")]
    assert epochs.fleet.participants == ("a",), "it was never asked"


def test_versions_do_not_go_back() -> None:
    epochs = _epochs("a")
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    epochs.acknowledged("a", 1, 0)
    epochs.begin(1)
    with pytest.raises(ValueError, match="version 6 is older than 7"):
        epochs.sent(1, _manifest(6), 1)


def _publish(epochs: Epochs, version: int) -> SendOrder:
    [send] = epochs.begin(0)
    assert isinstance(send, Send)
    epochs.sent(send.order.epoch, _manifest(version), 0)
    actions = [epochs.acknowledged(member, send.order.epoch, 0) for member in send.order.members]
    assert actions[-1] == [Deliver(version)]
    return send.order


def test_other_processes_are_another_epoch() -> None:
    epochs = _epochs("a", "b")
    assert _publish(epochs, 1) == SendOrder(1, ("a", "b"))
    epochs.fleet.died("a")
    assert _publish(epochs, 2) == SendOrder(2, ("b",)), "nobody waits for the dead"
    epochs.fleet.restarted("a")
    assert _publish(epochs, 3) == SendOrder(2, ("b",)), "it was not asked to take part"
    epochs.fleet.include("a")
    assert _publish(epochs, 4) == SendOrder(3, ("a", "b"))
    epochs.fleet.died("a")
    epochs.fleet.restarted("a")
    epochs.fleet.include("a")
    assert _publish(epochs, 4) == SendOrder(4, ("a", "b")), "the same names, but one of them is a new process"
    epochs.fleet.leave("b")
    assert _publish(epochs, 5) == SendOrder(5, ("a",))
    assert _publish(epochs, 6) == SendOrder(5, ("a",))


def test_one_that_dies_after_its_acknowledgement_does_not_serve() -> None:
    """The others make the version count; it is back by then, with the weights that the run began with."""
    epochs = _epochs("a", "b")
    epochs.begin(0)
    epochs.sent(1, _manifest(7), 0)
    epochs.acknowledged("a", 1, 1)
    epochs.fleet.died("a")
    epochs.fleet.restarted("a")
    assert epochs.acknowledged("b", 1, 2) == [Deliver(7)]
    assert (epochs.fleet.serving, epochs.fleet.in_state("stale"), epochs.fleet.hung) == (("b",), ("a",), ())


def test_one_that_leaves_the_fleet_while_it_is_asked_is_lost_and_not_hung() -> None:
    epochs = _epochs("a", "b", required=1)
    epochs.begin(0)
    epochs.fleet.died("b")
    epochs.fleet.leave("b")
    epochs.sent(1, _manifest(7), 0)
    assert epochs.lost("b", 1, "b died", 1) == [Abort(1, "b died")]
    assert epochs.acknowledged("a", 1, 2) == [Send(SendOrder(2, ("a",), dense=True))]
    epochs.sent(2, _manifest(7), 2)
    assert epochs.acknowledged("a", 2, 2) == [Deliver(7)]
    assert (epochs.fleet.members, epochs.fleet.serving, epochs.fleet.hung) == (("a",), ("a",), ())


class AnyOrder(RuleBasedStateMachine):
    """Members that do anything at any time, and speak of any epoch. Some come back."""

    @initialize(count=st.integers(1, 4), required=st.integers(1, 4))
    def start(self, count: int, required: int) -> None:
        names = tuple(f"m{number}" for number in range(count))
        self.epochs = _epochs(*names, required=min(required, count))
        self.fleet = self.epochs.fleet
        self.now = 0.0
        self.next_version = 0
        self.sends: list[SendOrder] = []
        self.acks: set[tuple[str, int]] = set()
        self.dead: set[tuple[str, int]] = set()
        self.begun = 0.0
        self.counting = 0

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(order):
                    assert all(order.epoch > old.epoch for old in self.sends if self.attempts) or not self.attempts
                    self.attempts += 1
                    assert self.attempts <= ATTEMPTS
                    assert order.dense == (self.attempts > 1)
                    assert order.members
                    self.sends.append(order)
                case Abort(epoch):
                    assert epoch == self.sends[-1].epoch
                case Deliver(version):
                    last = self.sends[-1]
                    assert version == self.next_version
                    assert {(member, last.epoch) for member in last.members} <= self.acks
                    assert not {(member, last.epoch) for member in last.members} & self.dead
                    self.counting = version
                case GiveUp():
                    assert self.epochs.state == "idle"

    @precondition(lambda self: self.epochs.state == "idle")
    @rule()
    def begin(self) -> None:
        for name in self.fleet.reachable:
            self.fleet.include(name)
        if not self.fleet.participants:
            return
        self.attempts, self.begun = 0, self.now
        self.next_version += 1
        self.acks.clear()
        self._take(self.epochs.begin(self.now))

    def _epoch(self, back: int) -> int:
        return self.epochs.epoch - back

    @rule(back=st.sampled_from([0, 0, 0, 1]))
    def sent(self, back: int) -> None:
        self._take(self.epochs.sent(self._epoch(back), _manifest(self.next_version), self.now))

    @rule(back=st.sampled_from([0, 0, 0, 1]))
    def export_fails(self, back: int) -> None:
        self._take(self.epochs.failed(self._epoch(back), "no room", self.now))

    @rule(member=st.integers(0, 3), back=st.sampled_from([0, 0, 0, 1]))
    def acknowledge(self, member: int, back: int) -> None:
        self.acks.add((f"m{member}", self._epoch(back)))
        self._take(self.epochs.acknowledged(f"m{member}", self._epoch(back), self.now))

    @rule(member=st.integers(0, 3), back=st.sampled_from([0, 0, 0, 1]))
    def refuse(self, member: int, back: int) -> None:
        self._take(self.epochs.refused(f"m{member}", self._epoch(back), "no", self.now))

    @rule(member=st.integers(0, 3), back=st.sampled_from([0, 0, 0, 1]))
    def lose(self, member: int, back: int) -> None:
        if self.epochs.state == "sending" and self.epochs.under_way is not None:
            self.dead.add((f"m{member}", self._epoch(back)))
        self._take(self.epochs.lost(f"m{member}", self._epoch(back), "dead", self.now))

    @rule(member=st.integers(0, 3))
    def die(self, member: int) -> None:
        """While it generates: the publication that it takes part in may hear of it later, or not at all."""
        self.fleet.died(f"m{member}")

    @rule(member=st.integers(0, 3))
    def restart(self, member: int) -> None:
        self.fleet.restarted(f"m{member}")

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.epochs.tick(self.now))
        self._take(self.epochs.tick(self.now))  # what a tick begins may be due as well

    @invariant()
    def nothing_waits_beyond_its_deadline(self) -> None:
        if not hasattr(self, "epochs") or self.epochs.state == "idle":
            return
        assert self.now < self.epochs.wake <= self.begun + ATTEMPTS * (EXPORT + DEADLINE + GRACE)

    @invariant()
    def only_a_delivery_counts(self) -> None:
        if hasattr(self, "epochs"):
            assert self.fleet.published_version == self.counting

    @invariant()
    def only_those_serve_who_hold_what_counts_or_what_is_under_way(self) -> None:
        if hasattr(self, "epochs"):
            for name in self.fleet.serving:
                assert name in self.fleet.participants
                assert self.fleet.version_of(name) in range(self.counting, self.next_version + 1)


AnyOrder.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(st.integers(1, 5))
def test_silence_alone_always_ends(count: int) -> None:
    """No event but the passing of time."""
    epochs = _epochs(*(f"m{number}" for number in range(count)), required=1)
    epochs.begin(0)
    actions, steps = epochs.sent(1, _manifest(3), 0), 0
    while not any(isinstance(action, GiveUp) for action in actions):
        actions, steps = epochs.tick(epochs.wake), steps + 1
        assert steps < 10
    assert epochs.fleet.participants == ()
    assert len(epochs.fleet.hung) == count
