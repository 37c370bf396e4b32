"""The engines of a run: who is in the fleet, who may generate, and which policy version each one holds.

The one owner of these facts: everybody else asks here. Events in, decisions out: no I/O, no clock, any type of handle.

    join --> joining --started--> stale --acknowledged--> healthy --drain--> draining --leave--> no member any more
                                    ^                        |                  |
                                    +--restarted-- restarting <--died           +--died--> gone
                                                       |
                                                       +-- died more than `max_restarts` times, or gave up: gone

    serving ⊆ participants ⊆ reachable ⊆ members

A process that is new or comes back has the weights that the run began with. It may generate only after it has
acknowledged the published version, which is at least the last one it had acknowledged before (guarantee G12).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from asyncrl.types import WeightManifest

State = Literal["joining", "healthy", "restarting", "stale", "draining", "gone"]
HandleT = TypeVar("HandleT")


@dataclass
class _Engine(Generic[HandleT]):
    handle: HandleT | None
    """None while it is being started for the first time."""
    state: State
    version: int | None
    """The last that its present process acknowledged."""
    participates: bool
    """Publications go to it."""
    hung: bool = False
    """The last publication that it took part in went on without it, although its process had not died."""
    restarts: int = 0


class FleetState(Generic[HandleT]):
    """Engines by name. A name is used once: what is said late of an engine that left cannot hit another one."""

    def __init__(self, handles: Mapping[str, HandleT], max_restarts: int = 0) -> None:
        """Every engine begins with the weights of the run's model, which are version 0."""
        self._max_restarts = max_restarts
        self._engines = {name: _Engine(handle, "healthy", 0, participates=True) for name, handle in handles.items()}
        self._names = set(handles)
        """Also of those that left."""
        self.manifest: WeightManifest | None = None
        """Of the published version; none before the first publication."""
        self.membership_changes = 0
        """Counts how often a process began or ceased to take part in publications."""

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def published_version(self) -> int:
        """The one that counts: every participant has acknowledged it."""
        return 0 if self.manifest is None else self.manifest.version

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._engines)

    @property
    def reachable(self) -> tuple[str, ...]:
        """Those that a version can be published to."""
        return self.in_state("healthy", "stale", "draining")

    @property
    def participants(self) -> tuple[str, ...]:
        """Those that publications go to."""
        return tuple(name for name, engine in self._engines.items() if engine.participates)

    @property
    def serving(self) -> tuple[str, ...]:
        """Those that may be given work."""
        return self.in_state("healthy")

    @property
    def hung(self) -> tuple[str, ...]:
        return tuple(name for name, engine in self._engines.items() if engine.hung)

    @property
    def hopeful(self) -> bool:
        """Whether an engine serves, or one may come."""
        return bool(self.in_state("healthy", "stale", "restarting", "joining"))

    @property
    def handles(self) -> dict[str, HandleT]:
        """Of every engine that was started, dead ones too."""
        return {name: engine.handle for name, engine in self._engines.items() if engine.handle is not None}

    @property
    def restarts(self) -> dict[str, int]:
        return {name: engine.restarts for name, engine in self._engines.items()}

    def in_state(self, *states: State) -> tuple[str, ...]:
        return tuple(name for name, engine in self._engines.items() if engine.state in states)

    def version_of(self, name: str) -> int | None:
        """The last that its present process acknowledged."""
        return self._engines[name].version

    # -- engines come and go -------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """A new engine is being started."""
        if name in self._names:
            raise ValueError(f"{name} is or was here already: a new engine has a new name")
        self._names.add(name)
        self._engines[name] = _Engine(None, "joining", None, participates=False)

    def started(self, name: str, handle: HandleT) -> None:
        """A new engine answers, with old weights."""
        engine = self._engines[name]
        if engine.state != "joining":
            raise ValueError(f"{name} is {engine.state}: only an engine that joins is started")
        engine.handle, engine.state = handle, "stale"

    def drain(self, name: str) -> None:
        """It gets nothing to do from now on, but every version until it leaves."""
        engine = self._engines[name]
        if engine.state != "healthy":
            raise ValueError(f"{name} is {engine.state}: only an engine that serves is drained")
        engine.state = "draining"

    def leave(self, name: str) -> HandleT | None:
        """It is no member any more; its handle, if it was ever started."""
        engine = self._engines.pop(name)
        self._participates(engine, False)
        return engine.handle

    # -- processes die and come back -----------------------------------------------------------------------------

    def died(self, name: str) -> bool:
        """Whether it is to be brought back now: not if somebody does already, if nobody needs it, nor if it died too
        often."""
        engine = self._engines.get(name)
        if engine is None or name not in self.reachable:
            return False
        needed = engine.state != "draining"
        engine.restarts += needed
        engine.state = "restarting" if needed and engine.restarts <= self._max_restarts else "gone"
        engine.version, engine.hung = None, False
        self._participates(engine, False)
        return engine.state == "restarting"

    def restarted(self, name: str) -> None:
        """It answers again, with old weights."""
        if name in self.in_state("restarting"):
            self._engines[name].state = "stale"

    def gave_up(self, name: str) -> None:
        """It did not come back."""
        if name in self.in_state("restarting"):
            self._engines[name].state = "gone"

    # -- publications --------------------------------------------------------------------------------------------

    def include(self, name: str) -> None:
        """Publications go to it from now on."""
        engine = self._engines[name]
        if name not in self.reachable:
            raise ValueError(f"{name} is {engine.state}: no version can be published to it")
        engine.hung = False
        self._participates(engine, True)

    def left_behind(self, name: str, *, hung: bool) -> None:
        """A publication goes on without it: it died, or it hung and may never answer again."""
        engine = self._engines.get(name)
        if engine is None or not engine.participates:
            return
        engine.hung = hung
        engine.state = "stale" if engine.state == "healthy" else engine.state
        self._participates(engine, False)

    def acknowledged(self, name: str, version: int) -> None:
        """It holds `version`, digest checked. It may serve as soon as that version counts."""
        engine = self._engines.get(name)
        if engine is not None and engine.participates:  # what a dead process said last does not count
            engine.version = max(version, engine.version or 0)
            self._judge(engine)

    def published(self, manifest: WeightManifest) -> None:
        """The version counts."""
        if manifest.version < self.published_version:
            raise ValueError(f"version {manifest.version} is older than {self.published_version}, which counts already")
        self.manifest = manifest
        for engine in self._engines.values():
            self._judge(engine)

    def _judge(self, engine: _Engine[HandleT]) -> None:
        """Whether it may serve. One that is ahead of the published version acknowledged the next one early."""
        if engine.state == "stale" and engine.participates and engine.version == self.published_version:
            engine.state = "healthy"
        elif engine.state == "healthy" and (engine.version or 0) < self.published_version:
            engine.state = "stale"

    def _participates(self, engine: _Engine[HandleT], now: bool) -> None:
        self.membership_changes += engine.participates != now
        engine.participates = now
