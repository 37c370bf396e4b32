"""Published weights, copied into tensors that an engine holds, for the policy and for a drafting head alike."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weights.manifest import digest_tensors
from asyncrl.weights.transport import read_published


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
        raise WeightSyncError(
            f"engine {receiver.engine}: weights of version {manifest.version} have digest {digest}, published was "
            f"{manifest.digest}; {receiver.kept} is kept, publish again"
        )
    return digest


def check_fit(manifest: WeightManifest, held: dict[str, Tensor], receiver: Receiver) -> None:
    published = {(spec.name, spec.shape) for spec in manifest.tensors}
    differing = published ^ {(name, tuple(tensor.shape)) for name, tensor in held.items()}
    if differing:
        names = ", ".join(f"{name} {shape}" for name, shape in sorted(differing)[:5])
        raise WeightSyncError(
            f"engine {receiver.engine}: version {manifest.version} belongs to another {receiver.model}, differing in "
            f"{names}; publish the {receiver.model} that the engine was started with"
        )
