"""Which engines may generate: events in, decisions out, no I/O.

    healthy --died--> restarting --started--> stale --refitted--> healthy
                          |
                          +-- more than `max_restarts` times: gone

A process that comes back has the weights that the run began with. It may generate again only after it has acknowledged
a version that is at least the last one it had acknowledged before (guarantee G12).
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["healthy", "restarting", "stale", "gone"]


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
        return tuple(name for name, replica in self.replicas.items() if replica.state == "healthy")

    @property
    def reachable(self) -> tuple[str, ...]:
        """Those that a version can be published to."""
        return tuple(name for name, replica in self.replicas.items() if replica.state in ("healthy", "stale"))

    @property
    def hopeful(self) -> bool:
        """Whether an engine serves, or one may come back."""
        return any(replica.state != "gone" for replica in self.replicas.values())

    def died(self, name: str) -> bool:
        """Whether it is to be brought back now: not if somebody does already, nor if it died too often."""
        replica = self.replicas[name]
        if replica.state in ("restarting", "gone"):
            return False
        replica.restarts += 1
        replica.state = "restarting" if replica.restarts <= self._max_restarts else "gone"
        return replica.state == "restarting"

    def started(self, name: str) -> None:
        """It answers, with old weights."""
        if self.replicas[name].state == "restarting":
            self.replicas[name].state = "stale"

    def gave_up(self, name: str) -> None:
        """It did not come back."""
        self.replicas[name].state = "gone"

    def acknowledged(self, name: str, version: int) -> None:
        replica = self.replicas[name]
        if replica.state == "stale" and version >= replica.version:
            replica.state = "healthy"
        if replica.state == "healthy":
            replica.version = max(replica.version, version)
