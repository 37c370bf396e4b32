"""Published weights, copied into tensors that an engine holds, for the policy and for a drafting head alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.adapters import adapted_shapes, check_adapters, has_adapters, shapes_of
from asyncrl.errors import WeightSyncError
from asyncrl.models import lora
from asyncrl.models.checkpoint import read_weights
from asyncrl.types import WeightManifest
from asyncrl.weights.manifest import digest_tensors
from asyncrl.weights.transports.registry import digest_published, read_published


class Receiver(NamedTuple):
    """Who loads, for what it says when it refuses."""

    engine: str
    kept: str
    """What stays in use, such as `version 3`."""
    model: str
    """What the weights should belong to, such as `model`."""


@torch.no_grad()
def load_published(manifest: WeightManifest, held: dict[str, Tensor], receiver: Receiver) -> str:
    """Copy the published tensors in; the old ones come back unless the digest of what we hold agrees."""
    check_fit(manifest, held, receiver)
    old = {name: tensor.clone() for name, tensor in held.items()}
    for name, tensor in read_published(manifest, torch.device("cpu")):
        held[name].copy_(tensor)
    digest = digest_tensors((spec.name, held[spec.name].to(getattr(torch, spec.dtype))) for spec in manifest.tensors)
    if digest != manifest.digest:
        for name, tensor in old.items():
            held[name].copy_(tensor)
        raise WeightSyncError(wrong_digest(manifest, digest, receiver))
    return digest


@torch.no_grad()
def load_adapters(manifest: WeightManifest, held: dict[str, Tensor], base: Path, receiver: Receiver) -> str:
    """Every tensor anew: the ones that the engine was started with, and published adapters added to them."""
    who, of_model = f"engine {receiver.engine}", shapes_of(held.items())
    check_adapters(manifest, {name: of_model.get(name, ()) for name in adapted_shapes(manifest)}, who)
    digest = digest_published(manifest)
    if digest != manifest.digest:
        raise WeightSyncError(wrong_digest(manifest, digest, receiver))
    for name, tensor in read_whole(manifest, base):
        if name in held:
            held[name].copy_(tensor)
    return digest


def read_whole(manifest: WeightManifest, base: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a version; where only adapters were published, they are merged into the base, in fp32."""
    published = read_published(manifest, torch.device("cpu"))
    if not has_adapters(manifest):
        return published
    return lora.merged_tensors(
        ((name, tensor.float()) for name, tensor in read_weights(base)), lora.unstacked(published)
    )


def wrong_digest(manifest: WeightManifest, digest: str, receiver: Receiver) -> str:
    return (
        f"engine {receiver.engine}: weights of version {manifest.version} have digest {digest}, published was "
        f"{manifest.digest}; {receiver.kept} is kept, publish again"
    )


def not_in_fp8(engine: str, version: int) -> str:
    return (
        f"engine {engine}: version {version} is meant for FP8, and this engine was started without it; start both with "
        "the same rollout.precision"
    )


def check_fit(manifest: WeightManifest, held: dict[str, Tensor], receiver: Receiver) -> None:
    published = {(spec.name, spec.shape) for spec in manifest.tensors}
    differing = published ^ {(name, tuple(tensor.shape)) for name, tensor in held.items()}
    if differing:
        names = ", ".join(f"{name} {shape}" for name, shape in sorted(differing)[:5])
        raise WeightSyncError(
            f"engine {receiver.engine}: version {manifest.version} belongs to another {receiver.model}, differing in "
            f"{names}; publish the {receiver.model} that the engine was started with"
        )
