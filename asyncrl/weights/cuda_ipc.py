"""Weights through CUDA IPC: one flat buffer on the trainer's GPU, mapped by engines on the same card.

Two buffers alternate, so a version can be written while a slow receiver still reads the one before. The digest is
computed on the GPU, because copying the weights to the host would take a hundred times as long as loading them.
"""

from functools import cache
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.optional import require
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors, fill, source_of
from asyncrl.weights.manifest import CUDA_IPC
from asyncrl.weights.shared_memory import Alternating

cupy = require("cupy", extra="nccl")


class CudaIpcWriter:
    """The trainer's side. `tensors` is called for each publication and yields the HF-named weights."""

    def __init__(self, tensors: Tensors) -> None:
        self._source = source_of(tensors)
        self._buffers: dict[int, Any] = {}
        self._places = Alternating()

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        specs, total = self._source.layout()
        memory = self._buffer(self._places.slot(version), total)
        buckets, digest = fill(self._source, Flat(specs, torch.as_tensor(memory, device="cuda"))).seal()
        handle = cupy.cuda.runtime.ipcGetMemHandle(memory.data.ptr)
        return WeightManifest(
            version=version,
            tensors=specs,
            total_bytes=total,
            digest=digest,
            location=CUDA_IPC + handle.hex(),
            buckets=buckets,
        )

    def close(self) -> None:
        self._buffers.clear()

    def _buffer(self, slot: int, size: int) -> Any:
        """An allocation of its own: a handle covers the whole allocation, and torch would share it with others."""
        if slot not in self._buffers:
            memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
            self._buffers[slot] = cupy.ndarray(size, dtype=cupy.uint8, memptr=memory)
            self._buffers[slot].fill(0)  # the gaps between tensors count in the digest
        return self._buffers[slot]


_flats: dict[str, Flat] = {}
"""By location: the trainer's two buffers stay where they are."""


def mapped(manifest: WeightManifest) -> Flat:
    """The trainer's own memory, the same object for the same place: copy what must outlive the next update."""
    flat = _flats.get(manifest.location)
    if flat is None or flat.specs != manifest.tensors:
        flat = _flats[manifest.location] = _map(manifest)
    return flat


def _map(manifest: WeightManifest) -> Flat:
    try:
        pointer = _open(manifest.location)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise WeightSyncError(
            f"version {manifest.version} cannot be mapped ({error}); CUDA IPC needs trainer and engine on one card"
        ) from None
    memory = cupy.cuda.UnownedMemory(pointer, manifest.total_bytes, owner=None)
    array = cupy.ndarray(manifest.total_bytes, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return Flat(manifest.tensors, torch.as_tensor(array, device="cuda"))


@cache
def _open(location: str) -> int:
    """The same handle can be opened once per process, and stays valid as long as the trainer's allocation."""
    return cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(location.removeprefix(CUDA_IPC)))
