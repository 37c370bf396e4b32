"""Weights through shared memory: the trainer writes one file in memory, engines on the same host map it.

Two files alternate, so a version can be written while a slow receiver still reads the one before. They live in
/dev/shm where there is one, are readable by the owner alone, and belong to a directory that the writer removes.
`multiprocessing.shared_memory` is not used: its resource tracker unlinks a block when any reader exits.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightManifest
from asyncrl.weights.manifest import NamedTensors, as_bytes, digest_tensors, layout


def shared_directory(prefix: str) -> Path:
    """A fresh directory, mode 0700, on a memory file system where the host has one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=f"asyncrl-{prefix}-", dir=memory if memory.is_dir() else None))


class SharedMemoryWriter:
    """The trainer's side. `tensors` is called for each publication and yields the HF-named weights."""

    def __init__(self, tensors: Callable[[], NamedTensors], *, prefix: str) -> None:
        self._tensors = tensors
        self._directory = shared_directory(prefix)

    def publish(self, version: int) -> WeightManifest:
        named = list(self._tensors())
        specs, total = layout(named)
        path = self._directory / f"weights-{version % 2}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _reserve(descriptor, total, path)
            with mmap.mmap(descriptor, total) as memory:
                _copy_into(memory, [(spec.offset, tensor) for spec, (_, tensor) in zip(specs, named, strict=True)])
        finally:
            os.close(descriptor)
        return WeightManifest(
            version=version, tensors=specs, total_bytes=total, digest=digest_tensors(named), location=str(path)
        )

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _reserve(descriptor: int, size: int, path: Path) -> None:
    """Take the room now: a memory file system that is full would otherwise end the process while it copies."""
    try:
        os.ftruncate(descriptor, size)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise WeightSyncError(f"no room for {size} bytes of weights at {path}: {error.strerror}; free some") from None


def _copy_into(memory: mmap.mmap, placed: list[tuple[int, torch.Tensor]]) -> None:
    target = torch.frombuffer(memory, dtype=torch.uint8)
    for offset, tensor in placed:
        source = as_bytes(tensor)
        target[offset : offset + source.numel()].copy_(source)
    del target  # releases the buffer export, or closing the map would fail


def read_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the published tensors. They are views of the map: copy what must outlive the iteration."""
    try:
        descriptor = os.open(manifest.location, os.O_RDONLY)
    except OSError as error:
        raise WeightSyncError(f"version {manifest.version} is not at {manifest.location}: {error}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < manifest.total_bytes:
            raise WeightSyncError(
                f"weights of version {manifest.version}: {manifest.location} holds {size} bytes, "
                f"the manifest says {manifest.total_bytes}"
            )
        memory = mmap.mmap(descriptor, manifest.total_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype)
        count = spec.bytes // dtype.itemsize
        yield spec.name, torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
