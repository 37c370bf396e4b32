"""When the drafter may compute: while the policy's trainer waits, and for a small share of the time in which it works.

Whether it works is one byte of shared memory. The drafter is the job of least importance: it looks at the byte between
two of its own small updates. A message would cost the trainer more than the training that it makes room for.
"""

import asyncio
import mmap
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

LOOK_SECONDS = 0.005
"""How often a waiting drafter checks whether it may continue."""


class BusyFlag:
    """Shared by processes of one host through a file."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 1)
        self._byte = mmap.mmap(descriptor, 1)
        os.close(descriptor)

    @property
    def is_set(self) -> bool:
        return self._byte[0] == 1

    @contextmanager
    def set(self) -> Generator[None, None, None]:
        self._byte[0] = 1
        try:
            yield
        finally:
            self._byte[0] = 0


class IdleGate:
    """Of the drafter. Of the time in which it had work and the policy's trainer was busy, it takes `share`."""

    def __init__(self, busy: BusyFlag, share: float) -> None:
        self._busy, self._share = busy, share
        self._waited = 0.0
        self.seconds = 0.0
        """That the drafter has computed."""
        self.seconds_beside = 0.0
        """Of these, begun while the trainer was at work."""

    async def opened(self) -> None:
        """Returns when the drafter may compute a little."""
        await asyncio.sleep(0)
        while self._busy.is_set and not self._may_take():
            began = perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            self._waited += perf_counter() - began

    def _may_take(self) -> bool:
        return self._share == 1 or self.seconds_beside < self._share * (self.seconds_beside + self._waited)

    @contextmanager
    def computing(self) -> Generator[None]:
        beside, began = self._busy.is_set, perf_counter()
        try:
            yield
        finally:
            taken = perf_counter() - began
            self.seconds += taken
            self.seconds_beside += taken * beside
