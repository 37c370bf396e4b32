"""The transports behind one protocol and a pair of functions: a manifest's `location` says how to get at its bytes."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch

from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors
from asyncrl.weights.manifest import CUDA_IPC
from asyncrl.weights.transports import file, nccl, shared_memory
from asyncrl.weights.transports.mirror import Mirror, MirrorWriter

Transport = Literal["shared_memory", "cuda_ipc", "nccl", "file"]


class Writer(Protocol):
    """The trainer's side of a transport."""

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        """Put the weights where the order's members can get them; without an order, where anybody can."""
        ...

    def close(self) -> None: ...


def make_writer(
    tensors: Tensors,
    transport: Transport,
    *,
    prefix: str,
    folder: Path | None = None,
    deadline_s: float = 120.0,
    delta: bool = False,
) -> Writer:
    """`tensors` is called for each publication; `folder` is where the file transport writes."""
    match transport:
        case "shared_memory":
            return shared_memory.SharedMemoryWriter(tensors, prefix=prefix)
        case "cuda_ipc":
            from asyncrl.weights.transports.cuda_ipc import CudaIpcWriter

            return CudaIpcWriter(tensors)
        case "nccl":
            from asyncrl.weights.transports.cupy_nccl import CupyNccl

            carrier = nccl.NcclCarrier(CupyNccl(), _card(), deadline_s=deadline_s)
            return MirrorWriter(tensors, carrier, sparse=delta, device=_card())
        case "file":
            carrier = file.FileCarrier(folder or shared_memory.shared_directory(prefix))
            return MirrorWriter(tensors, carrier, sparse=delta)


def read_published(manifest: WeightManifest, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a publication, on `device`: views of the trainer's memory where they can be."""
    return ((name, tensor.to(device)) for name, tensor in published(manifest).tensors())


def digest_published(manifest: WeightManifest) -> str:
    """Digest of the bytes that a receiver here finds at the manifest's location."""
    flat = published(manifest)
    # A mirror has been checked, bucket by bucket, when it was filled.
    return manifest.digest if _location(manifest).startswith((nccl.SCHEME, file.SCHEME)) else flat.digest()


def published(manifest: WeightManifest) -> Flat:
    """The bytes of a publication, brought here if they have to be."""
    location = _location(manifest)
    if location.startswith(CUDA_IPC):
        from asyncrl.weights.transports import cuda_ipc

        return cuda_ipc.mapped(manifest)
    if location.startswith(nccl.SCHEME):
        return _gpu_mirror().receive(manifest, _nccl_receiver().bring)
    if location.startswith(file.SCHEME):
        return _mirror().receive(manifest, file.bring)
    return shared_memory.mapped(manifest)


def to_file(manifest: WeightManifest, folder: Path) -> WeightManifest:
    """The same publication as a file, written by whoever can reach it: for a replica that joins late."""
    path = file.write(manifest, published(manifest), folder)
    return msgspec.structs.replace(manifest, location=f"{file.SCHEME}{path}", base="", delta=None)


def _location(manifest: WeightManifest) -> str:
    return manifest.location if manifest.delta is None else manifest.delta.location


@cache
def _mirror() -> Mirror:
    """One per process."""
    return Mirror()


@cache
def _gpu_mirror() -> Mirror:
    return Mirror(_card())


@cache
def _nccl_receiver() -> nccl.NcclReceiver:
    from asyncrl.weights.transports.cupy_nccl import CupyNccl

    return nccl.NcclReceiver(CupyNccl(), _card())


def _card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
