"""Drives one weight version from the trainer to every engine. A version counts only when each digest came back."""

import time
from collections.abc import Sequence

import msgspec

from actors.acknowledged import acknowledged
from actors.drafter_link import DrafterLink
from actors.rollout import RolloutActor
from actors.trainer import TrainerActor


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One completed publication."""

    version: int
    seconds: float
    bytes: int
    digest: str
    reprefilled_tokens: int


class Publisher:
    """Control only: the bytes go from the trainer's memory to the engines' without passing here."""

    def __init__(
        self,
        trainer: TrainerActor,
        rollouts: Sequence[RolloutActor],
        drafter: DrafterLink | None = None,
        *,
        timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._rollouts = rollouts
        self._drafter = drafter
        self._timeout_s = timeout_s

    async def publish(self) -> Published:
        begun = time.perf_counter()
        manifest = await self._trainer.export_weights()
        loading = [rollout.load_weights(manifest) for rollout in self._rollouts]
        acks = await acknowledged(manifest, loading, self._timeout_s)
        if self._drafter is not None:
            self._drafter.follow(manifest)
        return Published(
            version=manifest.version,
            seconds=time.perf_counter() - begun,
            bytes=manifest.total_bytes,
            digest=manifest.digest,
            reprefilled_tokens=sum(ack.reprefilled_tokens for ack in acks),
        )
