"""Tells the buffer how far an engine's answers are, in case that its process dies. Nobody waits for it."""

import asyncio
import time
from collections.abc import Mapping

from actors.background import notice
from actors.buffer import BufferActor
from asyncrl.flow.gathering import GATHER_SECONDS
from asyncrl.types import Segment, Slot

EVERY_SECONDS = 1.0
"""Least time between two notes of one engine: versions may follow each other faster than a death is worth."""
CALLS_PER_SECOND = 16
"""That the engines of a run make together, at most, when they are many."""


class Notes:
    def __init__(self, buffer: BufferActor, engines: int) -> None:
        self._buffer = buffer
        self._every_s = max(EVERY_SECONDS, engines / CALLS_PER_SECOND)
        self._noting: asyncio.Task[None] | None = None
        self._noted = float("-inf")

    def begin(self, begun: Mapping[Slot, tuple[Segment, ...]]) -> None:
        """An update has cut off what runs: `begun`, as it will be then, is noted soon."""
        if self._noting is None or self._noting.done():
            self._noting = asyncio.create_task(self._note(begun))
            self._noting.add_done_callback(notice)

    async def _note(self, begun: Mapping[Slot, tuple[Segment, ...]]) -> None:
        # What the update cut off is still on its way to its readers.
        await asyncio.sleep(max(GATHER_SECONDS, self._noted + self._every_s - time.monotonic()))
        self._noted = time.monotonic()
        if begun:
            await self._buffer.note(dict(begun))
