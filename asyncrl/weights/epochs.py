"""The rules of a publication, attempt by attempt: events in, actions out, no I/O and no clock of its own.

    idle --begin--> sending --every member acknowledged--> idle, the version counts
                       | a member refuses, is lost, or the deadline passes
                       v
                     ending: Abort; every member has to say that it is out of the attempt, as only those who
                       |     can still say something are alive
                       v     (all have, or the grace is over)
                    sending again under the next epoch, every byte, with the live members; or GiveUp

FleetState knows who takes part and which version counts; a publication goes to those who take part when it begins.
An epoch is one group of members; over NCCL it is one communicator, which one failed member makes useless for all. It
lasts over versions until an attempt fails or other processes take part. What is said of an earlier epoch changes
nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.fleet.state import FleetState
from asyncrl.types import SendOrder, WeightManifest

ATTEMPTS = 2


@dataclass(frozen=True)
class Send:
    """Bring the trainer's version to these members."""

    order: SendOrder


@dataclass(frozen=True)
class Abort:
    """End what is under way in this epoch; nobody may wait in it any longer."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Deliver:
    """The version counts: each member has acknowledged it."""

    version: int


@dataclass(frozen=True)
class GiveUp:
    """The version does not count, and will not."""

    version: int | None
    reason: str


Action = Send | Abort | Deliver | GiveUp
State = Literal["idle", "sending", "ending"]


@dataclass
class Epochs:
    """`required` members must stay; with fewer a version is given up. Times are seconds of any one clock."""

    fleet: FleetState[Any]
    deadline_s: float
    grace_s: float
    required: int
    export_s: float = float("inf")
    """For the trainer, which may be busy, to put its version out; the members' deadline begins then."""
    epoch: int = 1
    members: tuple[str, ...] = field(default=(), init=False)
    """Of the publication that is under way, or was last: who is still asked."""
    state: State = field(default="idle", init=False)
    under_way: WeightManifest | None = field(default=None, init=False)
    """What this attempt brings, once the trainer has put it out."""
    wake: float = field(default=float("inf"), init=False)
    """When `tick` has something to do."""
    _acknowledged: set[str] = field(default_factory=set[str], init=False)
    _out: set[str] = field(default_factory=set[str], init=False)
    """Alive and out of the failed attempt."""
    _lost: set[str] = field(default_factory=set[str], init=False)
    _attempt: int = field(default=0, init=False)
    _reasons: list[str] = field(default_factory=list[str], init=False)
    _membership: int = field(init=False)
    """`membership_changes` as they were when the epoch began."""

    def __post_init__(self) -> None:
        self._membership = self.fleet.membership_changes

    def begin(self, now: float) -> list[Action]:
        if self.state != "idle":
            raise ValueError(f"epoch {self.epoch} is {self.state}: one version at a time")
        self._attempt, self._reasons, self.members = 0, [], self.fleet.participants
        if self.fleet.membership_changes != self._membership:
            self._next_epoch()
        return self._send(now, dense=False)

    def sent(self, epoch: int, manifest: WeightManifest, now: float) -> list[Action]:
        """The trainer has put its version out."""
        if epoch == self.epoch and self.state == "sending":
            version, published = manifest.version, self.fleet.published_version
            if version < published:
                raise ValueError(f"version {version} is older than {published}, which counts already")
            self.under_way, self.wake = manifest, now + self.deadline_s
        return []

    def acknowledged(self, member: str, epoch: int, now: float) -> list[Action]:
        """It serves the version, checked."""
        if not self._speaks(member, epoch):
            return []
        assert self.under_way is not None
        self.fleet.acknowledged(member, self.under_way.version)
        if self.state == "ending":
            return self._is_out(member, now)
        self._acknowledged.add(member)
        if self._acknowledged != set(self.members):
            return []
        self.state, self.wake = "idle", float("inf")
        self.fleet.published(self.under_way)
        return [Deliver(self.under_way.version)]

    def refused(self, member: str, epoch: int, reason: str, now: float) -> list[Action]:
        """It stays with the version before, and is out of the attempt."""
        if not self._speaks(member, epoch):
            return []
        actions = self._fail(reason, now) if self.state == "sending" else []
        return actions + self._is_out(member, now)

    def lost(self, member: str, epoch: int, reason: str, now: float) -> list[Action]:
        """It will never answer again."""
        if not self._speaks(member, epoch):
            return []
        actions = self._fail(reason, now) if self.state == "sending" else []
        self._lost.add(member)
        self._out.discard(member)
        return actions + self._rebuild(now)

    def failed(self, epoch: int, reason: str, now: float) -> list[Action]:
        """The trainer could not put its version out, so no member has heard of it."""
        if epoch != self.epoch or self.state != "sending" or self.under_way is not None:
            return []
        actions = self._fail(reason, now)
        self._out = set(self.members)
        return actions + self._rebuild(now)

    def tick(self, now: float) -> list[Action]:
        if now < self.wake:
            return []
        if self.state == "ending":
            return self._rebuild(now, grace_over=True)
        if self.under_way is None:
            return self.failed(self.epoch, f"the trainer put no version out within {self.export_s:g} s", now)
        silent = ", ".join(member for member in self.members if member not in self._acknowledged)
        return self._fail(f"no answer from {silent} within {self.deadline_s:g} s", now) + self._rebuild(now)

    def _speaks(self, member: str, epoch: int) -> bool:
        """Whether it may have its say: it has heard of this attempt, and is not dead."""
        asked = epoch == self.epoch and self.state != "idle" and self.under_way is not None
        return asked and member in self.members and member not in self._lost

    def _send(self, now: float, *, dense: bool) -> list[Action]:
        self._attempt += 1
        self.state, self.wake, self.under_way = "sending", now + self.export_s, None
        self._acknowledged, self._out, self._lost = set(), set(), set()
        return [Send(SendOrder(self.epoch, self.members, dense))]

    def _fail(self, reason: str, now: float) -> list[Action]:
        """Members that have acknowledged are out of it already; over NCCL others notice only by their own deadline."""
        over = max(now, self.wake if self.under_way is not None else now) + self.grace_s
        self.state, self.wake, self._out = "ending", over, set(self._acknowledged)
        self._reasons.append(reason)
        return [Abort(self.epoch, reason)]

    def _is_out(self, member: str, now: float) -> list[Action]:
        self._out.add(member)
        return self._rebuild(now)

    def _rebuild(self, now: float, *, grace_over: bool = False) -> list[Action]:
        """The next epoch, as soon as it is known who can be in it."""
        silent = set(self.members) - self._out - self._lost
        possible = len(self._out) + (0 if grace_over else len(silent))
        hopeless = self._attempt == ATTEMPTS or possible < self.required
        if silent and not grace_over and not hopeless:
            return []
        if grace_over and silent:
            self._reasons.append(f"{', '.join(sorted(silent))} hung")
        gone = self._lost | (silent if grace_over else set[str]())
        for member in gone:
            self.fleet.left_behind(member, hung=member in silent)
        self.members = tuple(member for member in self.members if member not in gone)
        self._next_epoch()
        if hopeless:
            self.state, self.wake = "idle", float("inf")
            return [GiveUp(None if self.under_way is None else self.under_way.version, "; ".join(self._reasons))]
        return self._send(now, dense=True)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._membership = self.fleet.membership_changes
