"""Who takes part in a run."""

import asyncio
from collections.abc import Awaitable, Callable
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
    engines: dict[str, RolloutActor]
    """The same object that the publisher has: whoever joins or leaves here does so there."""
    trainer: TrainerActor
    publisher: Publisher
    hiring: "Hiring"
    drafter: DrafterLink | None = None

    async def close(self) -> None:
        """Ask everybody to end but engines that are known to be dead or hung; the cluster ends whoever does not.

        The buffer is last: the others may still have something for it.
        """
        drafters = [self.drafter] if self.drafter is not None else []
        others = [*self.publisher.living.values(), self.reward, *drafters, self.trainer]
        await asyncio.gather(*(_close(actor) for actor in others))
        await _close(self.buffer)


@dataclass(frozen=True)
class Hiring:
    """How engines come and go while a run goes on."""

    hire: Callable[[str], Awaitable[RolloutActor]]
    """Places another one, under a new name; waits until the cluster has room for it."""
    dismiss: Callable[[RolloutActor], None]
    """Ends its process."""
    expect: Callable[[int], None]
    """Tells the cluster how many there should be in all, so that it can bring machines; 0: no matter any more."""


async def _close(actor: RolloutActor | RewardActor | DrafterLink | TrainerActor | BufferActor) -> None:
    with suppress(ActorError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await actor.close()
