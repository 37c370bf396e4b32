"""Killed anywhere, resumed from any checkpoint: the same deliveries, and the state at the kill."""

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.journal import FILE_BYTES, STEM, Folded, first_record
from asyncrl.buffer.log import segment_paths
from asyncrl.buffer.reader import verify
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.data.arrow import encode
from asyncrl.errors import ConfigError
from asyncrl.types import Delivery, Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload, trajectory

TERMS: dict[str, Any] = {
    "group_size": 3,
    "groups_per_step": 3,
    "max_staleness": 2,
    "segment_bytes": 4000,
    "drop_uninformative": True,
}


def rewarded(group: int, sample: int, reward: float, version: int = 0) -> bytes:
    return encode(msgspec.structs.replace(trajectory(group, sample, version), reward=reward))


Recorded = tuple[int, tuple[int, ...], list[bytes]]
"""Step, groups and payloads of a delivery."""


class Trainer:
    """Takes what it is given, and remembers it. Its checkpoint is its number of steps."""

    def __init__(self, buffer: TrajectoryBuffer, step: int = 0) -> None:
        self.buffer, self.step = buffer, step
        self.deliveries: list[Recorded] = []
        self.taken = 0

    def work(self, max_groups: int) -> Delivery | None:
        """Take once; commit the step when it is full."""
        delivery = self.buffer.take(max_groups)
        if delivery is not None:
            self.deliveries.append((delivery.step, delivery.groups, self.buffer.read(delivery)))
            self.taken += len(delivery.groups)
            if self.taken == TERMS["groups_per_step"]:
                self.buffer.commit(self.step)
                self.step, self.taken = self.step + 1, 0
        return delivery


class World:
    """Engines and a trainer that do something at random."""

    def __init__(self, buffer: TrajectoryBuffer, rng: random.Random, trainer: Trainer | None = None) -> None:
        self.buffer, self.rng = buffer, rng
        self.trainer = trainer or Trainer(buffer)
        self.now = 0.0
        self.in_flight: list[Slot] = []

    @property
    def version(self) -> int:
        return self.buffer.status().version

    def recorded(self, step: int) -> list[Recorded]:
        """What was delivered for `step` and later."""
        return [item for item in self.trainer.deliveries if item[0] >= step]

    def lease(self, ticket: Ticket) -> None:
        self.in_flight += [Slot(ticket.group, sample) for sample in ticket.samples]

    def forget(self) -> None:
        """What nobody waits for any more."""
        self.in_flight = [slot for slot in self.in_flight if self.buffer.awaits(slot)]

    def turn(self) -> None:
        choice = self.rng.random()
        self.now += 0.05
        if self.buffer.expire(self.now):
            self.forget()
        if choice < 0.3:
            if isinstance(ticket := self.buffer.admit(self.now), Ticket):
                self.lease(ticket)
        elif choice < 0.75 and self.in_flight:
            slot = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
            if self.rng.random() < 0.03:
                self.buffer.fail(slot, "reward_error", tokens=2)
                self.forget()
            else:
                reward = float(slot.sample if slot.group % 5 else 1)  # every fifth group is uninformative
                self.buffer.append(rewarded(slot.group, slot.sample, reward, self.version))
        elif choice < 0.9:
            self.trainer.work(max_groups=self.rng.randint(1, 3))
        elif choice < 0.92:
            self.buffer.limit(self.rng.randint(0, 2), max_ready=0)
        else:
            self.buffer.advance(self.trainer.step)


def killed(source: Path, target: Path) -> Path:
    """The directory as a kill at this moment leaves it."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock")))


def state(buffer: TrajectoryBuffer) -> tuple[Any, ...]:
    status = buffer.status()
    return buffer.ledger(), buffer.waste(), status.step, status.taken, status.bytes, status.complete


def replay(buffer: TrajectoryBuffer, step: int, recorded: int, version: int, rng: random.Random) -> Trainer:
    """Repeat `recorded` deliveries; up to `version`, versions are published again some time after their commit."""
    trainer = Trainer(buffer, step)
    while len(trainer.deliveries) < recorded:
        if rng.random() < 0.3:
            buffer.advance(min(trainer.step, version))
            continue
        assert buffer.replaying
        assert not isinstance(buffer.admit(0.0), Ticket)
        with pytest.raises(ValueError, match="during the replay"):
            buffer.reissue(0.0)
        delivery = trainer.work(max_groups=1)
        assert delivery is not None
        assert delivery.replayed
    buffer.advance(min(trainer.step, version))
    return trainer


def run_until_killed(directory: Path, seed: int) -> World:
    rng = random.Random(seed)
    journal_bytes = 300 if seed % 2 else FILE_BYTES  # folded after every few commits, or never
    incomplete_min = 2 if seed > 1 else 0  # groups are trained on without the samples that fail, or dropped
    world = World(open_buffer(directory, **TERMS, journal_bytes=journal_bytes, incomplete_min=incomplete_min), rng)
    for _ in range(rng.randint(200, 350)):
        world.turn()
    while not world.in_flight:
        world.turn()
    assert world.trainer.step >= 3
    assert any(len(found) % TERMS["group_size"] for _, _, found in world.trainer.deliveries) == (seed > 1)
    assert world.buffer.ledger().dropped["uninformative"]
    folds = [isinstance(first_record(path), Folded) for path in segment_paths(directory, STEM)]
    assert any(folds) == bool(seed % 2), folds
    return world


@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_run_repeats_its_deliveries_and_ends_where_it_was_killed(tmp_path: Path, seed: int) -> None:
    world = run_until_killed(tmp_path / "run", seed)
    for step in {0, world.trainer.step // 2, world.trainer.step}:
        directory = killed(tmp_path / "run", tmp_path / f"resumed-{step}")
        buffer = open_buffer(directory, restore_step=step, **TERMS)
        recorded = world.recorded(step)
        trainer = replay(buffer, step, len(recorded), world.version, random.Random(step))
        assert not buffer.replaying
        assert trainer.deliveries == recorded
        assert state(buffer) == state(world.buffer)
        assert buffer.status().version == max(world.version, step), "engines start with the checkpoint's version"


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_can_itself_be_killed(tmp_path: Path, seed: int) -> None:
    world, rng = run_until_killed(tmp_path / "run", seed), random.Random(seed)
    directory, step = tmp_path / "run", 0
    for attempt in range(4):
        directory = killed(directory, tmp_path / f"attempt-{attempt}")
        buffer = open_buffer(directory, restore_step=step, **TERMS)
        recorded = world.recorded(step)[:3]
        trainer = replay(buffer, step, len(recorded), world.version, rng)
        assert trainer.deliveries == recorded
        step = rng.randint(step, trainer.step)  # a checkpoint of some step of the replay
    buffer = open_buffer(killed(directory, tmp_path / "last"), restore_step=step, **TERMS)
    replay(buffer, step, len(world.recorded(step)), world.version, rng)
    assert not buffer.replaying
    assert state(buffer) == state(world.buffer)


@pytest.mark.parametrize("seed", range(2))
def test_what_was_in_flight_is_issued_again_and_the_run_goes_on(tmp_path: Path, seed: int) -> None:
    before, rng = run_until_killed(tmp_path / "run", seed), random.Random(seed)
    assert before.in_flight
    step = before.trainer.step - 1
    buffer = open_buffer(killed(tmp_path / "run", tmp_path / "resumed"), restore_step=step, **TERMS)
    after = World(buffer, rng, replay(buffer, step, len(before.recorded(step)), before.version, rng))
    incomplete = {slot.group for slot in before.in_flight}
    assert incomplete.isdisjoint(buffer.expire(now=1e9)), "the deadlines of the last run do not count"
    assert buffer.status().refusal.startswith("resume: ")
    after.now = 1000.0
    for ticket in buffer.reissue(after.now):
        assert ticket.deadline == 1010.0
        after.lease(ticket)
    assert sorted(after.in_flight) == sorted(before.in_flight)
    for _ in range(400):
        after.turn()
    assert after.trainer.step > before.trainer.step
    assert buffer.ledger().balanced
    assert verify(tmp_path / "resumed").sound
    trained = [group for _, groups, _ in before.trainer.deliveries for group in groups]
    later = [group for _, groups, _ in after.trainer.deliveries[len(before.recorded(step)) :] for group in groups]
    assert later
    assert len(set(trained + later)) == len(trained + later), "no group is trained twice"


def test_the_version_at_the_kill_is_not_used_before_it_is_published_again(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run")
    for group in range(4):
        buffer.admit(0.0)
        buffer.append_many([payload(group, 0), payload(group, 1)])
    buffer.take(2)
    buffer.commit(0)
    buffer.advance(1)
    again = open_buffer(killed(tmp_path / "run", tmp_path / "resumed"), restore_step=0)
    again.take(2)
    again.commit(0)
    assert again.replaying, "engines still serve version 0"
    assert not isinstance(again.admit(0.0), Ticket)
    again.advance(1)
    ticket = again.admit(0.0)
    assert isinstance(ticket, Ticket)
    assert ticket.version == 1


def test_a_publication_that_the_kill_prevented_is_recorded_after_the_replay(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", max_staleness=0)
    for group in range(2):
        buffer.admit(0.0)
        buffer.append_many([payload(group, 0), payload(group, 1)])
    buffer.take(2)
    buffer.commit(0)
    again = open_buffer(killed(tmp_path / "run", tmp_path / "resumed"), restore_step=1, max_staleness=0)
    assert not again.replaying
    ticket = again.admit(0.0)
    assert isinstance(ticket, Ticket), "engines start with the checkpoint's version"
    assert ticket.version == 1


def test_the_admission_bound_survives_a_kill_and_a_replay_keeps_to_the_recorded_one(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", max_staleness=2)
    for group in range(2):
        buffer.admit(0.0)
        buffer.append_many([payload(group, 0), payload(group, 1)])
    buffer.take(2)
    buffer.commit(0)
    buffer.limit(0, max_ready=0)
    buffer.advance(1)
    again = open_buffer(killed(tmp_path / "run", tmp_path / "resumed"), restore_step=0, max_staleness=2)
    again.take(2)
    again.limit(1, max_ready=0)  # a controller that begins again must not write into the record
    again.commit(0)
    again.limit(1, max_ready=0)
    again.advance(1)
    assert [isinstance(again.admit(0.0), Ticket) for _ in range(3)] == [True, True, False], "one step of two groups"
    again.limit(7, max_ready=0)
    assert [isinstance(again.admit(0.0), Ticket) for _ in range(5)] == [True] * 4 + [False], "three steps, not eight"


def test_an_uninformative_group_stays_dropped_after_a_kill(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", max_staleness=0, drop_uninformative=True)
    for group in range(2):
        buffer.admit(0.0)
        buffer.append_many([rewarded(group, sample, reward=1.0) for sample in range(2)])
    assert not isinstance(buffer.admit(0.0), Ticket)
    pending = killed(tmp_path / "run", tmp_path / "pending")
    assert buffer.expire(0.0) == (0, 1)
    ticket = buffer.admit(0.0)
    assert isinstance(ticket, Ticket)
    assert ticket.group == 2, "its place is free again"
    assert buffer.ledger().dropped == {"uninformative": 4}
    assert buffer.waste() == {"uninformative": 20}
    again = open_buffer(
        killed(tmp_path / "run", tmp_path / "resumed"), restore_step=0, max_staleness=0, drop_uninformative=True
    )
    assert state(again) == state(buffer)
    assert buffer.append(rewarded(0, 0, reward=1.0)).status == "dropped"
    # Killed between the last sample and the drop: the samples say it again.
    early = open_buffer(pending, restore_step=0, max_staleness=0, drop_uninformative=True)
    assert early.expire(0.0) == (0, 1)
    assert early.ledger().dropped == {"uninformative": 4}


def _two_steps(directory: Path) -> None:
    """Under a bound of 1: one step taken and published, one of version 0 delivered, and groups of version 1 waiting."""
    buffer = open_buffer(directory)
    for group in range(4):
        assert isinstance(buffer.admit(0.0), Ticket)
        buffer.append_many([payload(group, sample) for sample in range(2)])
    buffer.take(2, 2)
    buffer.commit(0)
    buffer.advance(1)
    for group in (4, 5):
        assert isinstance(buffer.admit(0.0), Ticket)
        buffer.append_many([payload(group, sample, version=1) for sample in range(2)])
    buffer.take(2, 2)
    buffer.close()


def test_a_resumed_run_may_lower_its_bound(tmp_path: Path) -> None:
    """What was delivered is delivered again; from then on the tighter bound holds, for groups that wait as well."""
    _two_steps(tmp_path)
    buffer = open_buffer(tmp_path, max_staleness=0, restore_step=1)
    delivery = buffer.take(2, 2)
    assert delivery == Delivery(step=1, groups=(2, 3), replayed=True)
    buffer.commit(1)
    assert buffer.reissue(1.0) == []
    buffer.advance(2)
    assert buffer.take(2, 2) is None
    assert buffer.ledger().dropped == {"stale": 4}
    assert [buffer.admit(1.0) for _ in range(3)][:2] == [
        Ticket(group=group, samples=(0, 1), version=2, deadline=11.0) for group in (6, 7)
    ]
    assert buffer.ledger().in_flight == 4, "one step's groups and no more"
    buffer.close()
    again = open_buffer(tmp_path, max_staleness=0, restore_step=2)
    assert again.ledger().balanced
    again.close()
    assert verify(tmp_path).sound


@pytest.mark.parametrize("changes", [{"max_staleness": 2}, {"group_size": 3}, {"groups_per_step": 1}])
def test_other_rules_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    _two_steps(tmp_path)
    with pytest.raises(ConfigError, match="resume with the same settings, or with a lower max_staleness"):
        open_buffer(tmp_path, restore_step=1, **changes)
