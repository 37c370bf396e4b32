"""Actors of one process, started and ended together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.trainer.actor import TrainerActor


class Actors(Protocol):
    buffer: BufferActor
    reward: RewardActor
    rollout: RolloutActor
    trainer: TrainerActor


ActorsT = TypeVar("ActorsT", bound=Actors)


@asynccontextmanager
async def serving(at: ActorsT) -> AsyncGenerator[ActorsT, None]:
    await asyncio.gather(at.reward.start(), at.rollout.start())
    try:
        yield at
    finally:
        for actor in (at.rollout, at.reward, at.trainer, at.buffer):
            await actor.close()
