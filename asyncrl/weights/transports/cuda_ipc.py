"""Weights through CUDA IPC: one flat buffer on the trainer's GPU, mapped by engines on the same card.

It has room for two versions, so one can be written while a slow receiver still reads the one before. Both are in one
allocation because to map one of 16 GB stops all work of a process on the GPU for 90 ms (H200): so that happens once.
The digest is computed on the GPU: to copy the weights to the host would take a hundred times as long as to load them.
"""

from functools import cache
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.system.optional import require
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors, fill, source_of
from asyncrl.weights.transports.base import Transport, WriterOptions
from asyncrl.weights.transports.shared_memory import Alternating

SCHEME = "cuda-ipc:"


class CudaIpc(Transport):
    """Engines map the trainer's own memory of the card that they share."""

    scheme = SCHEME

    def writer(self, tensors: Tensors, options: WriterOptions) -> "CudaIpcWriter":
        return CudaIpcWriter(tensors)

    def read(self, manifest: WeightManifest) -> Flat:
        return mapped(manifest)


def _cupy() -> Any:
    return require("cupy", extra="nccl")


class CudaIpcWriter:
    """The trainer's side. `tensors` is called for each publication and yields the HF-named weights."""

    def __init__(self, tensors: Tensors) -> None:
        self._source = source_of(tensors)
        self._memory: Any = None
        self._places = Alternating()

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        specs, total = self._source.layout()
        if self._memory is None:
            self._memory = _allocate(2 * total)
        offset = total * self._places.slot(version)
        memory = torch.as_tensor(self._memory[offset : offset + total], device="cuda")
        buckets, digest = fill(self._source, Flat(specs, memory)).seal()
        handle = _cupy().cuda.runtime.ipcGetMemHandle(self._memory.data.ptr)
        return WeightManifest(
            version=version,
            tensors=specs,
            total_bytes=total,
            digest=digest,
            location=f"{SCHEME}{handle.hex()}@{offset}",
            buckets=buckets,
        )

    def close(self) -> None:
        self._memory = None


def _allocate(size: int) -> Any:
    """An allocation of its own: a handle covers the whole allocation, and torch would share it with others."""
    cupy = _cupy()
    memory = cupy.ndarray(size, cupy.uint8, cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))
    memory.fill(0)  # the gaps between tensors count in the digest
    return memory


def mapped(manifest: WeightManifest) -> Flat:
    """The trainer's own memory: copy what must outlive the next update."""
    cupy = _cupy()
    handle, _, offset = manifest.location.removeprefix(SCHEME).partition("@")
    try:
        pointer = _open(handle) + int(offset)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise WeightSyncError(
            f"version {manifest.version} cannot be mapped ({error}); CUDA IPC needs trainer and engine on one card"
        ) from None
    memory = cupy.cuda.UnownedMemory(pointer, manifest.total_bytes, owner=None)
    array = cupy.ndarray(manifest.total_bytes, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return Flat(manifest.tensors, torch.as_tensor(array, device="cuda"))


@cache
def _open(handle: str) -> int:
    """The same handle can be opened once per process, and stays valid as long as the trainer's allocation."""
    return _cupy().cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
