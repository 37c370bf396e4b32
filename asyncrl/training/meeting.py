"""Where the ranks of a trainer find each other: a store in the process that starts them, at one address only."""

import socket
from datetime import timedelta
from typing import Any, cast

import msgspec
from torch import distributed

TCPStore: Any = cast(Any, distributed).TCPStore  # documented, and not marked as exported


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place among the others."""

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float
    """Longest wait for the others."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def store(self) -> Any:
        return TCPStore(self.host, self.port, is_master=False, timeout=self.timeout)


class Meeting:
    """Open as long as it lives; ranks need it to the end."""

    def __init__(self, host: str, world: int, timeout_s: float) -> None:
        with socket.create_server((host, 0)) as listening:  # TCPStore's own would listen at every address
            port = listening.getsockname()[1]
            descriptor = listening.detach()
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        self.seats = [Seat(rank=rank, world=world, host=host, port=port, timeout_s=timeout_s) for rank in range(world)]
