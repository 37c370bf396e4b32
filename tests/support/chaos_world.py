"""A whole run in one thread: engines, buffer, trainer and publisher, with everything between them on a bad network.

The buffer is the real one, on real files; so are the fleet's state and the rules of a publication. Engines, trainer
and driver are models of what the actors do. `restart` is what `asyncrl resume` does after a crash. After every event
the promises are checked; the directory that is left is checked by the same audit as a user's run.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffer.consumed import ConsumedGroups
from asyncrl.buffer.journal import FILE_BYTES
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.data.arrow import encode
from asyncrl.errors import CorruptSegmentError
from asyncrl.fleet.state import FleetState
from asyncrl.observe.audit.audit import audit
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.types import Delivery, Receipt, Segment, Slot, Ticket, Trajectory, WeightManifest
from asyncrl.weights.epochs import Action, Deliver, Epochs, GiveUp, Send
from tests.support.buffer_stores import open_buffer
from tests.support.chaos_network import Network

MAX_BYTES = 60_000
SAMPLE_BYTES = 1500


class Restart(Exception):  # noqa: N818
    """Somebody noticed that the run cannot go on as it is."""


class Engine:
    """Serves one version once it was given one."""

    def __init__(self) -> None:
        self.version: int | None = None


class World:
    def __init__(self, directory: Path, seed: int) -> None:
        self.net = Network(seed)
        rng = self.rng = self.net.rng
        self.directory = directory
        self.size, self.quota, self.staleness = rng.randint(1, 3), rng.randint(1, 3), rng.randint(0, 2)
        self.total = rng.randint(3, 6)
        self.trouble = rng.choice([0.0, 0.01, 0.04])
        """Chance of a crash, for each event."""
        self.saved = TrainingManifest(step=0, samples_trained=0, consumed=())
        self.stored: set[Slot] = set()
        self.restarts = 0
        self.life = -1
        self.fresh = True
        self._start()

    # -- lives ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.life += 1
        self.buffer = self._open()
        self.fresh = False
        self.engines = {f"rollout-{i}": Engine() for i in range(self.rng.randint(1, 3))}
        self.fleet = FleetState(self.engines, max_restarts=1_000_000)
        self.epochs = Epochs(self.fleet, 5.0, 2.0, required=1, export_s=10.0)
        self.step = self.saved.step
        self.trained = [group for first, last in self.saved.consumed for group in range(first, last + 1)]
        self.held: list[int] = []
        self.generating = False
        self._publish()
        self._later(0.0, self._take)
        self._later(1.0, self._tick)

    def _open(self) -> TrajectoryBuffer:
        terms: dict[str, Any] = {
            "group_size": self.size,
            "groups_per_step": self.quota,
            "max_staleness": self.staleness,
            "total_steps": self.total,
            "group_timeout_s": 20.0,
            "max_bytes": MAX_BYTES,
            "sample_bytes": SAMPLE_BYTES,
            "segment_bytes": 5000,
            "keep": "bytes:1",
            "journal_bytes": 400 if self.total == 5 else FILE_BYTES,
        }
        return open_buffer(self.directory, restore_step=None if self.fresh else self.saved.step, **terms)

    def restart(self) -> None:
        """All processes end at once; the files stay. Some crashes tear the last write."""
        self.restarts += 1
        _let_go(self.buffer)
        for path in self.directory.glob("*.open"):
            if self.rng.random() < 0.3:
                with path.open("ab") as file:
                    file.write(self.rng.randbytes(self.rng.randint(1, 60)))
        self._start()

    def _later(self, seconds: float, what: Any, *details: Any) -> None:
        life = self.life
        self.net.later(seconds, lambda: what(*details) if life == self.life else None)

    def _call(self, serve: Any, reply: Any, *, once: bool = False) -> None:
        """Between processes of this life: those of an earlier one are dead."""
        life = self.life

        def alive(call: Any, *details: Any) -> Any:
            return call(*details) if life == self.life else None

        self.net.call(partial(alive, serve), partial(alive, reply), partial(alive, self._lost) if once else None)

    def _lost(self) -> None:
        raise Restart("a call that must not be repeated was not answered")

    # -- the driver and its engines ------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.buffer.expire(self.net.now)
        self._act(self.epochs.tick(self.net.now))
        if not self.buffer.replaying:
            if not self.generating:
                self.generating = True
                self._share(self.buffer.reissue(self.net.now))
            else:
                self._call(self._admit, self._share)
        self._later(1.0, self._tick)

    def _admit(self) -> list[Ticket]:
        tickets: list[Ticket] = []
        while isinstance(ticket := self.buffer.admit(self.net.now), Ticket):
            tickets.append(ticket)
        return tickets

    def _share(self, tickets: list[Ticket]) -> None:
        if not self.fleet.serving:
            self._later(1.0, self._share, tickets)
            return
        for ticket in tickets:
            engine = self.engines[self.rng.choice(self.fleet.serving)]
            self.net.send(partial(self._generate, self.life, engine, ticket))

    def _generate(self, life: int, engine: Engine, ticket: Ticket) -> None:
        if life != self.life or engine.version is None:  # dead, or not refit since it was made anew
            return
        assert engine.version >= ticket.version, "an engine serves no version older than its tickets"
        for sample in ticket.samples:
            slot = Slot(ticket.group, sample)
            self._later(self.rng.expovariate(0.5), self._answer, engine, slot, engine.version)

    def _answer(self, engine: Engine, slot: Slot, begun: int) -> None:
        if engine.version is None:  # it died in the meantime
            return
        if self.rng.random() < 0.03:
            self._call(partial(self.buffer.fail, slot, "reward_error", 1), _ignore)
            return
        segments = (Segment.given([1, 2]), *(Segment.sampled([3], [-1.0], v) for v in (begun, engine.version)))
        answer = Trajectory(
            slot=slot, prompt="p", segments=segments, reward=0.0, finish="stop", started=0.0, finished=0.0, engine="e"
        )
        self._call(partial(self._append, encode(answer)), _ignore)

    def _append(self, payload: bytes) -> Receipt:
        receipt = self.buffer.append(payload)
        if receipt.status == "stored":
            assert receipt.slot not in self.stored, f"{receipt.slot} was stored twice"
            self.stored.add(receipt.slot)
        return receipt

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self.step < self.total:
            self._call(partial(self._deliver, self.rng.randint(1, self.quota)), self._accumulate, once=True)

    def _deliver(self, most: int) -> Delivery | None:
        delivery = self.buffer.take(most)
        if delivery is not None:
            assert len(self.buffer.read(delivery)) == self.size * len(delivery.groups), "groups are whole"
        return delivery

    def _accumulate(self, delivery: Delivery | None) -> None:
        if delivery is None:
            self._later(0.3, self._take)
            return
        assert delivery.step == self.step
        self.held += delivery.groups
        if len(self.held) < self.quota:
            self._take()
            return
        assert not set(self.held) & set(self.trained), "a group is trained on once"
        self.trained, self.held = self.trained + self.held, []
        step, self.step = self.step, self.step + 1
        self._call(partial(self.buffer.commit, step), lambda _: self._committed())

    def _committed(self) -> None:
        if self.rng.random() < 0.4 or self.step == self.total:
            consumed = ConsumedGroups(kept=3).update(self.trained)
            self.saved = TrainingManifest(
                step=self.step,
                samples_trained=len(self.trained) * self.size,
                consumed=consumed.ranges,
                earlier=consumed.earlier,
            )
            self.buffer.checkpointed(self.step)
            self.buffer.prune()
        self._publish()
        self._take()

    # -- the publisher -------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self.epochs.state == "idle":
            for name in self.fleet.reachable:
                self.fleet.include(name)
            self._act(self.epochs.begin(self.net.now))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(order):
                    self._later(0.1, self._export, order.epoch, order.members)
                case Deliver(version):
                    served = {self.engines[name].version for name in self.epochs.members}
                    assert served == {version}, f"version {version} counts, but engines serve {served}"
                    self._call(partial(self.buffer.advance, version), _ignore)
                    if version < self.step or self.fleet.in_state("stale"):
                        self._later(0.1, self._publish)
                case GiveUp():
                    raise Restart("the publisher gave up")
                case _:
                    pass

    def _export(self, epoch: int, members: tuple[str, ...]) -> None:
        version = self.step
        manifest = WeightManifest(version=version, tensors=(), total_bytes=0, digest="", location="")
        self._act(self.epochs.sent(epoch, manifest, self.net.now))
        for name in members:
            self._call(partial(self._load, name, version), partial(self._loaded, name, epoch))

    def _load(self, name: str, version: int) -> None:
        engine = self.engines[name]
        engine.version = version if engine.version is None else max(version, engine.version)

    def _loaded(self, name: str, epoch: int, _: None) -> None:
        self._act(self.epochs.acknowledged(name, epoch, self.net.now))

    def _crash_engine(self) -> None:
        """Made anew at once, without weights: what it was asked is forgotten."""
        name = self.rng.choice(list(self.engines))
        self.engines[name] = Engine()
        self.fleet.died(name)
        self.fleet.restarted(name)
        self._act(self.epochs.lost(name, self.epochs.epoch, "it died", self.net.now))
        self._later(1.0, self._publish)

    # -- one schedule --------------------------------------------------------------------------------------------

    def event(self) -> None:
        dice = self.rng.random() if self.net.hostile else 1.0
        if dice < self.trouble:
            raise Restart("the buffer was killed")
        if dice < 2 * self.trouble:
            self._crash_engine()
        self.net.step()

    def run(self, events: int, calm_events: int) -> None:
        """Trouble for a while; then none, and the run must come to its end."""
        for number in range(events + calm_events):
            self.net.hostile = number < events
            try:
                self.event()
            except (Restart, ValueError, CorruptSegmentError):  # the driver ends with what went wrong, and is resumed
                self.restart()
            self._check()
            if self.saved.step == self.total and not self.net.hostile:
                break
        assert self.saved.step == self.total, f"step {self.step} of {self.total}: {self.buffer.status()}"
        self.buffer.close()
        found = audit(self.directory, "test-run", {"checkpoint": self.saved})
        assert found.sound, found.violations
        assert found.ledger.consumed == self.total * self.quota * self.size

    def _check(self) -> None:
        ledger = self.buffer.ledger()
        assert ledger.balanced, ledger
        assert self.buffer.status().bytes <= MAX_BYTES
        assert len(set(self.trained)) == len(self.trained)
        for name in self.fleet.serving if self.fleet.manifest is not None else ():
            held, claimed = self.engines[name].version, self.fleet.version_of(name)
            assert held is not None and claimed is not None  # noqa: PT018
            assert held >= claimed >= self.fleet.published_version, f"{name} serves, but holds {held}, not {claimed}"


def _ignore(_: object) -> None: ...


def _let_go(buffer: Any) -> None:
    """The kernel closes the files of a process that ends; without it many schedules run out of descriptors."""
    buffer._unlock()
    for log in (buffer._log, buffer._journal._log):
        if log._file >= 0:
            os.close(log._file)
            log._file = -1
