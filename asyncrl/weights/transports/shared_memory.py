"""Weights through shared memory: the trainer writes one file in memory, engines on the same host map it.

Two files alternate, so a version can be written while a slow receiver still reads the one before, and the one before
can be loaded again. They live in /dev/shm where there is one, are readable by the owner alone, and belong to a
directory that the writer removes. `multiprocessing.shared_memory` is not used: its resource tracker unlinks a block
when any reader exits.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.system.scratch_dirs import scratch_directory
from asyncrl.types import Bucket, SendOrder, TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors, fill, source_of
from asyncrl.weights.manifest import digest_tensors as digest_tensors
from asyncrl.weights.transports.base import Transport, WriterOptions


class SharedMemory(Transport):
    """Engines map the file that the trainer wrote; a location is its plain path."""

    scheme = ""

    def writer(self, tensors: Tensors, options: WriterOptions) -> "SharedMemoryWriter":
        return SharedMemoryWriter(tensors, prefix=options.prefix)

    def read(self, manifest: WeightManifest) -> Flat:
        return mapped(manifest)


def shared_directory(prefix: str) -> Path:
    """A fresh directory, mode 0700, on a memory file system where the host has one."""
    memory = Path("/dev/shm")
    return scratch_directory(f"{prefix}-", memory if memory.is_dir() else Path(tempfile.gettempdir()))


class Alternating:
    """Which of two places a version is written to: the same again for the same version, else the other."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._slot = 0

    def slot(self, version: int) -> int:
        if version != self._version:
            self._version, self._slot = version, 1 - self._slot
        return self._slot


class SharedMemoryWriter:
    """The trainer's side. `tensors` is called for each publication and yields the HF-named weights."""

    def __init__(self, tensors: Tensors, *, prefix: str) -> None:
        self._source = source_of(tensors)
        self._directory = shared_directory(prefix)
        self._places = Alternating()

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        specs, total = self._source.layout()
        path = self._directory / f"weights-{self._places.slot(version)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _reserve(descriptor, total, path)
            with mmap.mmap(descriptor, total) as memory:
                buckets, digest = self._write(specs, memory)
        finally:
            os.close(descriptor)
        return WeightManifest(
            version=version, tensors=specs, total_bytes=total, digest=digest, location=str(path), buckets=buckets
        )

    def _write(self, specs: tuple[TensorSpec, ...], memory: mmap.mmap) -> tuple[tuple[Bucket, ...], str]:
        """In a function of its own: its tensors must be gone before the map can be closed."""
        return fill(self._source, Flat(specs, torch.frombuffer(memory, dtype=torch.uint8))).seal()

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


def mapped(manifest: WeightManifest) -> Flat:
    """The published bytes, as long as the returned object lives; writing into it changes only this process's copy."""
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
    return Flat(manifest.tensors, torch.frombuffer(memory, dtype=torch.uint8))


def read_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the published tensors. They are views of the map: copy what must outlive the next update."""
    return mapped(manifest).tensors()
