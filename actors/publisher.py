"""Drives one weight version from the trainer to every engine. A version counts only when each digest came back."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from actors.rollout import RolloutActor
from actors.trainer import TrainerActor
from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightAck, WeightManifest


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One completed publication."""

    version: int
    seconds: float
    bytes: int
    digest: str
    reprefilled_tokens: int


class Publisher:
    """Control only: the bytes go from the trainer's memory to the engines' without passing here."""

    def __init__(self, trainer: TrainerActor, rollouts: Sequence[RolloutActor], *, timeout_s: float) -> None:
        self._trainer = trainer
        self._rollouts = rollouts
        self._timeout_s = timeout_s

    async def publish(self) -> Published:
        begun = time.perf_counter()
        manifest = await self._trainer.export_weights()
        try:
            async with asyncio.timeout(self._timeout_s):
                acks = await asyncio.gather(*(rollout.load_weights(manifest) for rollout in self._rollouts))
        except TimeoutError:
            raise WeightSyncError(
                f"version {manifest.version} was not acknowledged by every engine within {self._timeout_s:.0f} s"
            ) from None
        for ack in acks:
            _check(ack, manifest)
        return Published(
            version=manifest.version,
            seconds=time.perf_counter() - begun,
            bytes=manifest.total_bytes,
            digest=manifest.digest,
            reprefilled_tokens=sum(ack.reprefilled_tokens for ack in acks),
        )


def _check(ack: WeightAck, manifest: WeightManifest) -> None:
    if (ack.version, ack.digest) != (manifest.version, manifest.digest):
        raise WeightSyncError(
            f"{ack.engine} acknowledged version {ack.version} with digest {ack.digest}, published was "
            f"version {manifest.version} with digest {manifest.digest}"
        )
