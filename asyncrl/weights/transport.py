"""The transports behind one pair of functions: a manifest's `location` says how its bytes can be reached."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from asyncrl.types import WeightManifest
from asyncrl.weights import shared_memory
from asyncrl.weights.manifest import CUDA_IPC, NamedTensors, digest_tensors


class Writer(Protocol):
    """The trainer's side of a transport."""

    def publish(self, version: int) -> WeightManifest: ...

    def close(self) -> None: ...


def make_writer(tensors: Callable[[], NamedTensors], *, on_gpu: bool, prefix: str) -> Writer:
    """CUDA IPC for weights on a GPU with an engine on the same card, else shared memory."""
    if on_gpu:
        from asyncrl.weights.cuda_ipc import CudaIpcWriter

        return CudaIpcWriter(tensors)
    return shared_memory.SharedMemoryWriter(tensors, prefix=prefix)


def read_published(manifest: WeightManifest, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a publication, on `device`: views of the trainer's memory where they can be."""
    return ((name, tensor.to(device)) for name, tensor in _read(manifest))


def digest_published(manifest: WeightManifest) -> str:
    """Digest of the bytes that a receiver here finds at the manifest's location."""
    if manifest.location.startswith(CUDA_IPC):
        from asyncrl.weights import cuda_ipc

        return cuda_ipc.digest_published(manifest)
    return digest_tensors(shared_memory.read_tensors(manifest))


def _read(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    if manifest.location.startswith(CUDA_IPC):
        from asyncrl.weights import cuda_ipc

        return cuda_ipc.read_tensors(manifest)
    return shared_memory.read_tensors(manifest)
