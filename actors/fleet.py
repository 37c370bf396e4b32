"""Who takes part in a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.buffer import BufferActor
from actors.drafter_link import DrafterLink
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.trainer import TrainerActor


@dataclass(frozen=True)
class Fleet:
    """The actors of one run; a pipeline talks to them and to nothing else."""

    buffer: BufferActor
    reward: RewardActor
    rollouts: Sequence[RolloutActor]
    trainer: TrainerActor
    publisher: Publisher
    drafter: DrafterLink | None = None

    async def close(self) -> None:
        """Ask everybody to end; the cluster ends whoever does not."""
        for rollout in self.rollouts:
            await rollout.close()
        await self.reward.close()
        if self.drafter is not None:
            await self.drafter.close()
        await self.trainer.close()
        await self.buffer.close()
