"""A publication counts only when every engine has answered with the digest of what was published."""

import asyncio
from collections.abc import Awaitable, Iterable

from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightAck, WeightManifest


async def acknowledged(
    manifest: WeightManifest, loading: Iterable[Awaitable[WeightAck]], timeout_s: float
) -> list[WeightAck]:
    try:
        async with asyncio.timeout(timeout_s):
            acks = await asyncio.gather(*loading)
    except TimeoutError:
        raise WeightSyncError(
            f"version {manifest.version} was not acknowledged by every engine within {timeout_s:.0f} s"
        ) from None
    for ack in acks:
        if wrong := disagreement(ack, manifest):
            raise WeightSyncError(wrong)
    return acks


def disagreement(ack: WeightAck, manifest: WeightManifest) -> str:
    """What an engine has acknowledged, if it is not what was published."""
    if (ack.version, ack.digest) == (manifest.version, manifest.digest):
        return ""
    return (
        f"{ack.engine} acknowledged version {ack.version} with digest {ack.digest}, published was version "
        f"{manifest.version} with digest {manifest.digest}"
    )
