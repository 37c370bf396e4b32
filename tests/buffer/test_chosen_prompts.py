"""A curriculum in the buffer: what was chosen stays chosen, and after a kill anywhere the choices go on as without."""

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.journal import STEM, Asked, Folded, Journal, Measured, first_record
from asyncrl.buffer.log import segment_paths
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config.curriculum import Curriculum as Settings
from asyncrl.curriculum.policy import Curriculum
from asyncrl.data.arrow import encode
from asyncrl.observe.audit.audit import audit
from asyncrl.observe.query.tables import read_buffer
from asyncrl.types import Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload, trajectory

RULES: dict[str, Any] = {
    "group_size": 2,
    "groups_per_step": 3,
    "max_staleness": 2,
    "group_timeout_s": 1e9,
    "segment_bytes": 4000,
    "drop_uninformative": True,
}


def opened(directory: Path, restore_step: int | None = None, *, prune: bool = False) -> TrajectoryBuffer:
    curriculum = Curriculum(Settings(band=(0.2, 0.8), replay=0.5, weights="follow"), [2, 1], [9, None], seed=3)
    kept = {"keep": "steps:1", "journal_bytes": 500} if prune else {}
    return open_buffer(directory, restore_step=restore_step, curriculum=curriculum, **RULES, **kept)


class World:
    """Engines and a trainer that do something at random, the same for the same random numbers."""

    def __init__(self, buffer: TrajectoryBuffer, step: int = 0) -> None:
        self.buffer, self.step, self.taken = buffer, step, 0
        self.prompts: dict[int, int] = {}
        """By group, of every ticket that was issued here."""
        self.in_flight: list[Slot] = []

    def issued(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            assert self.prompts.setdefault(ticket.group, ticket.prompt_index) == ticket.prompt_index
            self.in_flight += [Slot(ticket.group, sample) for sample in ticket.samples]

    def live(self, turns: int, rng: random.Random) -> None:
        for _ in range(turns):
            chance = rng.random()
            self.buffer.expire(0.0)
            self.in_flight = [slot for slot in self.in_flight if self.buffer.awaits(slot)]
            if chance < 0.3:
                if isinstance(ticket := self.buffer.admit(0.0), Ticket):
                    self.issued([ticket])
            elif chance < 0.75 and self.in_flight:
                self._finish(self.in_flight.pop(rng.randrange(len(self.in_flight))), rng)
            elif chance < 0.8:
                self.issued([])
                again = self.buffer.reissue(0.0)  # an engine died
                self.in_flight = []
                self.issued(again)
            elif chance < 0.93:
                self._take(rng.randint(1, 3))
            else:
                self.buffer.advance(self.step)

    def _finish(self, slot: Slot, rng: random.Random) -> None:
        if rng.random() < 0.03:
            self.buffer.fail(slot, "reward_error")
            return
        made = trajectory(slot.group, slot.sample, self.buffer.status().version)
        self.buffer.append(encode(msgspec.structs.replace(made, reward=float(rng.random() < 0.5))))

    def _take(self, most: int) -> None:
        if (delivery := self.buffer.take(most)) is not None:
            self.taken += len(delivery.groups)
            if self.taken == RULES["groups_per_step"]:
                self.buffer.commit(self.step)
                self.step, self.taken = self.step + 1, 0

    def replay(self, version: int) -> None:
        """As a resumed run does, until generation may begin."""
        while self.buffer.replaying:
            self.buffer.advance(min(self.step, version))
            if self.buffer.replaying:
                self._take(3)
        self.issued(self.buffer.reissue(0.0))


def copied(source: Path, target: Path) -> Path:
    """The directory as a kill at this moment leaves it."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock")))


@pytest.mark.parametrize("prune", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_anywhere_the_same_prompts_are_asked(tmp_path: Path, seed: int, prune: bool) -> None:
    rng = random.Random(seed)
    world = World(opened(tmp_path / "run", prune=prune))
    world.live(rng.randint(300, 500), rng)
    if prune:
        world.buffer.checkpointed(world.step)
        assert world.buffer.prune().files
        assert isinstance(first_record(segment_paths(tmp_path / "run", STEM)[0]), Folded)
    version, at_the_kill = world.buffer.status().version, set(world.in_flight)
    found: list[dict[int, int]] = []
    for step in {world.step} if prune else {0, world.step // 2, world.step}:
        resumed = World(opened(copied(tmp_path / "run", tmp_path / f"from-{step}"), step), step)
        resumed.replay(version)
        assert (resumed.step, resumed.taken) == (world.step, world.taken)
        assert set(resumed.in_flight) == {slot for slot in at_the_kill if resumed.buffer.awaits(slot)}
        assert resumed.prompts.items() <= world.prompts.items(), "tickets issued again are for the same prompts"
        resumed.live(200, random.Random(77))
        found.append(resumed.prompts)
    world.in_flight = []
    world.issued(world.buffer.reissue(0.0))
    world.live(200, random.Random(77))
    for prompts in found:
        assert prompts.items() <= world.prompts.items(), "later ones are chosen as if nothing had happened"
        assert max(prompts) == max(world.prompts), "and as many of them"
    assert len(set(world.prompts.values())) < len(world.prompts), "some were asked again"
    assert world.buffer.ledger().dropped["uninformative"]


def test_the_directory_tells_which_prompt_each_group_had(tmp_path: Path) -> None:
    world = World(opened(tmp_path))
    world.live(400, random.Random(1))
    _, outcomes = read_buffer(tmp_path)
    assert dict(enumerate(outcomes.prompts.tolist())) == world.prompts
    found = audit(tmp_path, "test-run", {})
    assert found.sound, found.violations
    assert found.steps == world.step > 5


def test_a_choice_that_a_kill_cut_off_from_its_admission_does_not_count(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "run")
    buffer.admit(0.0)
    buffer.close()
    torn = copied(tmp_path / "run", tmp_path / "torn")
    journal = Journal(torn, run_id="test-run", sync=False)
    journal.recover()
    journal.write(Asked(1, 4000, 3))
    journal.close()
    _, outcomes = read_buffer(torn)
    assert outcomes.prompts.tolist() == [0]
    tickets = [opened(directory, 0) for directory in (tmp_path / "run", torn)]
    for each in tickets:
        each.reissue(0.0)
    whole, again = (each.admit(0.0) for each in tickets)
    assert whole == again
    assert isinstance(again, Ticket)
    assert again.prompt_index < 4000


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_groups_of_a_step_are_measured_by_number(tmp_path: Path, order: list[int]) -> None:
    """In which order they were finished and delivered is a matter of time."""
    buffer = opened(tmp_path)
    prompts = [ticket.prompt_index for _ in order if isinstance(ticket := buffer.admit(0.0), Ticket)]
    for group in order:
        for sample in range(2):
            made = trajectory(group, sample)
            buffer.append(encode(msgspec.structs.replace(made, reward=0.25 * sample * group)))
        buffer.expire(0.0)
        buffer.take(1)
    assert isinstance(buffer.admit(0.0), Ticket)
    for sample in range(2):  # the first earned nothing and was dropped as it taught nothing
        buffer.append(payload(3, sample))
    buffer.take(1)
    buffer.commit(0)
    buffer.close()
    records = Journal(tmp_path, run_id="test-run", sync=False).recover()
    fourth = next(record.prompt for record in records if isinstance(record, Asked) and record.group == 3)
    assert [record for record in records if isinstance(record, Measured)] == [
        Measured(0, (prompts[0],), (0.0,)),
        Measured(0, (prompts[1], prompts[2], fourth), (0.125, 0.25, 0.5)),
    ]


def test_without_a_curriculum_the_journal_has_neither_choices_nor_measures(tmp_path: Path) -> None:
    world = World(open_buffer(tmp_path, **RULES))
    world.live(300, random.Random(1))
    world.buffer.close()
    assert all(prompt == group for group, prompt in world.prompts.items())
    records = Journal(tmp_path, run_id="test-run", sync=False).recover()
    assert not [record for record in records if isinstance(record, Asked | Measured)]
