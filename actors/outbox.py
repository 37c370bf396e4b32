"""Finished answers on their way from an engine to the buffer, scored and appended a few at a time."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from actors.buffer import BufferActor
from actors.reward import RewardActor
from asyncrl.data.arrow import encode
from asyncrl.rewards.base import RewardFailure, RewardInput
from asyncrl.types import Slot, Trajectory

GATHER_SECONDS = 0.05
"""How long finished answers wait for company."""


class Outbox:
    def __init__(self, buffer: BufferActor, reward: RewardActor, scored: Callable[[Slot], None]) -> None:
        """`scored` is told of each answer that has its reward and now goes into the buffer."""
        self._buffer, self._reward, self._scored = buffer, reward, scored
        self._waiting: list[tuple[RewardInput, Trajectory]] = []
        self._flushing: asyncio.Task[None]

    async def hand_over(self, judged: RewardInput, trajectory: Trajectory) -> None:
        """Join the next batch; its failure is that of every answer in it."""
        if not self._waiting:
            self._flushing = asyncio.create_task(self._flush_soon())
            self._flushing.add_done_callback(notice)
        self._waiting.append((judged, trajectory))
        await asyncio.shield(self._flushing)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        batch, self._waiting = self._waiting, []
        await self._flush(batch)

    async def _flush(self, batch: Sequence[tuple[RewardInput, Trajectory]]) -> None:
        results = await self._reward.score([judged for judged, _ in batch])
        payloads: list[bytes] = []
        for result, (_, trajectory) in zip(results, batch, strict=True):
            self._scored(trajectory.slot)
            if isinstance(result, RewardFailure):
                await self._buffer.fail(trajectory.slot, result.reason, trajectory.sampled_tokens)
            else:
                payloads.append(encode(msgspec.structs.replace(trajectory, reward=result)))
        if payloads:
            await self._buffer.append(payloads)


def notice(task: "asyncio.Task[None]") -> None:
    """Look at a failure even if everyone who waited for it was cancelled by another one, which then is reported."""
    if not task.cancelled():
        task.exception()
