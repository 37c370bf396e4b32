"""Weights through CUDA IPC: one flat buffer on the trainer's GPU, mapped by engines on the same card.

Two buffers alternate, so a version can be written while a slow receiver still reads the one before. The digest is
computed on the GPU, because copying the weights to the host would take a hundred times as long as loading them.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import torch
import xxhash

from asyncrl.errors import WeightSyncError
from asyncrl.optional import require
from asyncrl.types import TensorSpec, WeightManifest
from asyncrl.weights.manifest import CUDA_IPC, NamedTensors, layout

cupy = require("cupy", extra="nccl")
_ODD = -7046029254386353131
"""The golden ratio in 64 bits: consecutive multiples are spread evenly."""
_CHUNK = 1 << 24


class CudaIpcWriter:
    """The trainer's side. `tensors` is called for each publication and yields the HF-named weights."""

    def __init__(self, tensors: Callable[[], NamedTensors]) -> None:
        self._tensors = tensors
        self._buffers: dict[int, Any] = {}

    def publish(self, version: int) -> WeightManifest:
        named = list(self._tensors())
        specs, total = layout(named)
        memory = self._buffer(version % 2, total)
        target = torch.as_tensor(memory, device=named[0][1].device)
        for spec, (_, tensor) in zip(specs, named, strict=True):
            target[spec.offset : spec.offset + spec.bytes].copy_(tensor.detach().reshape(-1).view(torch.uint8))
        digest = _digest(specs, target)  # waits for the copies
        handle = cupy.cuda.runtime.ipcGetMemHandle(memory.data.ptr)
        return WeightManifest(
            version=version, tensors=specs, total_bytes=total, digest=digest, location=CUDA_IPC + handle.hex()
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


def read_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the published tensors. They are views of the trainer's memory: copy what must outlive the next update."""
    memory = _mapped(manifest)
    for spec in manifest.tensors:
        part = memory[spec.offset : spec.offset + spec.bytes]
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def digest_published(manifest: WeightManifest) -> str:
    return _digest(manifest.tensors, _mapped(manifest))


def _mapped(manifest: WeightManifest) -> torch.Tensor:
    try:
        pointer = _open(manifest.location)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise WeightSyncError(
            f"version {manifest.version} cannot be mapped ({error}); CUDA IPC needs trainer and engine on one card"
        ) from None
    memory = cupy.cuda.UnownedMemory(pointer, manifest.total_bytes, owner=None)
    array = cupy.ndarray(manifest.total_bytes, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return torch.as_tensor(array, device="cuda")


@cache
def _open(location: str) -> int:
    """The same handle can be opened once per process, and stays valid as long as the trainer's allocation."""
    return cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(location.removeprefix(CUDA_IPC)))


def _digest(specs: tuple[TensorSpec, ...], memory: torch.Tensor) -> str:
    """Names, shapes and dtypes by hash; the bytes as a sum of 64-bit words, each times an odd number of its place."""
    words = memory.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        place = torch.arange(start, start + len(part), device=memory.device)
        total += (part * (place * _ODD | 1)).sum()
    names = xxhash.xxh3_64_hexdigest(msgspec.json.encode(specs))
    return f"{names}-{int(total) % 2**64:016x}"
