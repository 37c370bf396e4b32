"""Which engines may generate: events in, decisions out, no I/O.

    join --> joining --started--> stale --acknowledged--> healthy --drain--> draining --left--> forgotten
                                    ^                        |
                                    +---started-- restarting <--died
                                                      |
                                                      +-- more than `max_restarts` times: gone

A process that is new or comes back has the weights that the run began with. It may generate only after it has
acknowledged the current version, which is at least the last one it had acknowledged before (guarantee G12).
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["joining", "healthy", "restarting", "stale", "draining", "gone"]


@dataclass
class Replica:
    state: State = "healthy"
    restarts: int = 0
    version: int = 0
    """The last one that it acknowledged."""


class FleetHealth:
    def __init__(self, names: tuple[str, ...], max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.replicas = {name: Replica() for name in names}

    @property
    def serving(self) -> tuple[str, ...]:
        return self.those("healthy")

    @property
    def reachable(self) -> tuple[str, ...]:
        """Those that a version can be published to."""
        return self.those("healthy", "stale", "draining")

    @property
    def hopeful(self) -> bool:
        """Whether an engine serves, or one may come."""
        return bool(self.those("healthy", "stale", "restarting", "joining"))

    def those(self, *states: State) -> tuple[str, ...]:
        return tuple(name for name, replica in self.replicas.items() if replica.state in states)

    def join(self, name: str, version: int) -> None:
        """A new engine is being started; it may serve from `version` on."""
        if name in self.replicas:
            raise ValueError(f"{name} is or was here already: a new engine has a new name")
        self.replicas[name] = Replica("joining", version=version)

    def drain(self, name: str) -> None:
        """It gets nothing to do from now on."""
        self.replicas[name].state = "draining"

    def left(self, name: str) -> None:
        """It is no part of the run any more."""
        del self.replicas[name]

    def died(self, name: str) -> bool:
        """Whether it is to be brought back now: not if somebody does already, if nobody needs it, nor if it died too
        often."""
        replica = self.replicas.get(name)
        if replica is None or replica.state not in ("healthy", "stale"):
            return False
        replica.restarts += 1
        replica.state = "restarting" if replica.restarts <= self._max_restarts else "gone"
        return replica.state == "restarting"

    def started(self, name: str) -> None:
        """It answers, with old weights."""
        if name in self.those("restarting", "joining"):
            self.replicas[name].state = "stale"

    def gave_up(self, name: str) -> None:
        """It did not come back."""
        if name in self.replicas:
            self.replicas[name].state = "gone"

    def acknowledged(self, name: str, version: int) -> None:
        replica = self.replicas[name]
        if replica.state == "stale" and version >= replica.version:
            replica.state = "healthy"
        if replica.state in ("healthy", "draining"):
            replica.version = max(replica.version, version)
