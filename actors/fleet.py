"""Who takes part in a run."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from actors.buffer import BufferActor
from actors.drafter_link import DrafterLink
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.trainer import TrainerActor
from asyncrl.errors import ActorError

CLOSE_SECONDS = 30.0
"""For one actor to end in good order; vLLM needs several seconds."""


@dataclass(frozen=True)
class Fleet:
    """The actors of one run; a pipeline talks to them and to nothing else."""

    buffer: BufferActor
    reward: RewardActor
    engines: Mapping[str, RolloutActor]
    trainer: TrainerActor
    publisher: Publisher
    drafter: DrafterLink | None = None

    async def close(self) -> None:
        """Ask everybody to end but engines that are known to be dead or hung; the cluster ends whoever does not.

        The buffer is last: the others may still have something for it.
        """
        drafters = [self.drafter] if self.drafter is not None else []
        others = [*self.publisher.living.values(), self.reward, *drafters, self.trainer]
        await asyncio.gather(*(_close(actor) for actor in others))
        await _close(self.buffer)


async def _close(actor: RolloutActor | RewardActor | DrafterLink | TrainerActor | BufferActor) -> None:
    with suppress(ActorError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await actor.close()
