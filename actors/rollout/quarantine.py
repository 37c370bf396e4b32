"""Holds answers back while a new version is on trial.

Between loading weights and the probe's verdict an engine goes on with its answers. None of them may leave before it is
known that their last tokens were sampled by the version that they name; after a bad verdict none leaves at all.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class Quarantine:
    """One per engine."""

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._spoiled: set[str] = set()
        self._over = asyncio.Event()
        self._over.set()

    @contextmanager
    def running(self, request: str) -> Generator[None, None, None]:
        """For as long as the request is answered and its verdict is awaited."""
        self._running.add(request)
        try:
            yield
        finally:
            self._running.discard(request)
            self._spoiled.discard(request)

    @property
    def under_way(self) -> tuple[str, ...]:
        return tuple(self._running)

    async def spoiled(self, request: str) -> bool:
        """Whether the answer is worthless; waits for the verdict, if one is due."""
        await self._over.wait()
        return request in self._spoiled

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None, None]:
        """Until the end of the block answers wait."""
        self._over.clear()
        try:
            yield
        finally:
            self._over.set()

    def reject(self) -> list[str]:
        """The verdict is bad: returns the requests that may have tokens of the version on trial."""
        self._spoiled |= self._running
        return sorted(self._running)
