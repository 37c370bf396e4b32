"""Holds finished completions back while a new version is in quarantine.

Between loading weights and the result of the probe an engine goes on generating. No completion may leave before it is
known that its last tokens were sampled by the version that they name; after a failed probe none leaves at all.
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
        """While the request is generated and the probe's result is awaited."""
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
        """Whether the completion must be dropped; waits for the probe's result, if one is due."""
        await self._over.wait()
        return request in self._spoiled

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None, None]:
        """Completions wait until the end of the block."""
        self._over.clear()
        try:
            yield
        finally:
            self._over.set()

    def reject(self) -> list[str]:
        """The probe failed: returns the requests that may have tokens of the quarantined version."""
        self._spoiled |= self._running
        return sorted(self._running)
