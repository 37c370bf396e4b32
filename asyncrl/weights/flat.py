"""A publication's bytes in one piece of memory: a map of shared memory, a GPU's, or the receiver's own.

On a GPU its digest is one that the GPU computes as fast as it reads: the sum of 64-bit words, each times an odd number
of its place. One changed bit always changes it, because an odd factor can be undone modulo 2**64. Sums of neighbouring
ranges add up to that of both, so the digests of the buckets also give that of the whole, in one pass.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

from asyncrl.system.optional import require
from asyncrl.types import Bucket, TensorSpec, WeightManifest
from asyncrl.weights.manifest import BUCKET_BYTES, Range, as_bytes, cut, digest_sums, digest_tensors, is_word_sum

ODD = -7046029254386353131
"""The golden ratio in 64 bits: consecutive multiples are spread evenly."""
WORD = 8
_CHUNK = 1 << 24
_THREADS, _BLOCKS = 512, 264
"""Two blocks for each multiprocessor of an H200. With 4 loads of 16 bytes in every thread that is 8.6 MB on their way,
where the memory needs 3.5 (4.3 TB/s, some 800 ns); more blocks are no faster, and decoding kernels of the same moment
would find no room until one of them has ended."""
_SOURCE = """
extern "C" __global__
void word_sum(const ulonglong2* pairs, unsigned long long place, unsigned long long count, unsigned long long* sum) {
    unsigned long long own = 0, stride = (unsigned long long)gridDim.x * blockDim.x;
    #pragma unroll 4
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        ulonglong2 pair = pairs[i];
        unsigned long long factor = (place + 2 * i) * ODD;
        own += pair.x * (factor | 1ULL) + pair.y * ((factor + ODD) | 1ULL);
    }
    for (int lane = 16; lane; lane >>= 1) own += __shfl_down_sync(0xffffffffu, own, lane);
    if ((threadIdx.x & 31) == 0) atomicAdd(sum, own);
}
"""


def word_sums(memory: torch.Tensor, ranges: Sequence[Range]) -> list[int]:
    """The sum of each range, whose offset and size are multiples of 64 bytes."""
    return _on_gpu(memory, ranges) if memory.is_cuda else [_by_torch(memory, *part) for part in ranges]


def _by_torch(memory: torch.Tensor, offset: int, size: int) -> int:
    words = memory[offset : offset + size].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        first = offset // WORD + start
        total += (part * (torch.arange(first, first + len(part)) * ODD | 1)).sum()
    return int(total) % 2**64


def _on_gpu(memory: torch.Tensor, ranges: Sequence[Range]) -> list[int]:
    kernel = _kernel()
    cuda: Any = require("cupy", extra="nccl").cuda
    sums = torch.zeros(len(ranges), dtype=torch.int64, device=memory.device)
    torch.cuda.current_stream(memory.device).synchronize()  # the kernel runs on cupy's stream, behind torch's copies
    with cuda.Device(memory.device.index):
        for number, (offset, size) in enumerate(ranges):
            arguments = (memory.data_ptr() + offset, offset // WORD, size // (2 * WORD), sums[number:].data_ptr())
            kernel((_BLOCKS,), (_THREADS,), tuple(map(np.uint64, arguments)))
        cuda.Stream.null.synchronize()
    return [value % 2**64 for value in sums.tolist()]


@cache
def _kernel() -> Any:
    cupy: Any = require("cupy", extra="nccl")
    return cupy.RawKernel(_SOURCE.replace("ODD", f"{ODD % 2**64}ULL"), "word_sum")


class Flat:
    """Tensors at the offsets of their specs. On a GPU digests are word sums, as its bytes should not leave it."""

    def __init__(self, specs: tuple[TensorSpec, ...], memory: torch.Tensor, *, word_sums: bool | None = None) -> None:
        self.specs = specs
        self.memory = memory
        """Flat, uint8; zero between tensors."""
        self._word_sums = memory.is_cuda if word_sums is None else word_sums

    @classmethod
    def empty(cls, specs: tuple[TensorSpec, ...], total: int, device: torch.device | str = "cpu") -> "Flat":
        return cls(specs, torch.zeros(total, dtype=torch.uint8, device=device))

    @classmethod
    def receiving(cls, manifest: WeightManifest, device: torch.device | str = "cpu") -> "Flat":
        """Room for a publication, with digests of the kind that it has, wherever it was made."""
        flat = cls.empty(manifest.tensors, manifest.total_bytes, device)
        return cls(flat.specs, flat.memory, word_sums=is_word_sum(manifest.digest))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views, not copies."""
        for spec in self.specs:
            yield spec.name, self.tensor(spec)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        part = self.memory[spec.offset : spec.offset + spec.bytes]
        return part.view(getattr(torch, spec.dtype)).view(spec.shape)

    def put(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        self.memory[spec.offset : spec.offset + spec.bytes].copy_(as_bytes(tensor))

    def part(self, bucket: Bucket) -> torch.Tensor:
        return self.memory[bucket.offset : bucket.offset + bucket.bytes]

    def seal(self, limit: int = BUCKET_BYTES) -> tuple[tuple[Bucket, ...], str]:
        """The buckets with their digests, and the digest over all."""
        ranges = cut(len(self.memory), limit)
        digests = self._digests(ranges)
        return tuple(Bucket(*part, digest) for part, digest in zip(ranges, digests, strict=True)), self._whole(digests)

    def digest(self) -> str:
        return self._whole(self._digests(cut(len(self.memory))) if self._word_sums else [])

    def missing(self, buckets: tuple[Bucket, ...]) -> list[Bucket]:
        """The buckets whose bytes are not here, or not yet: a transfer can go on with these."""
        found = self._digests([(bucket.offset, bucket.bytes) for bucket in buckets])
        return [bucket for bucket, digest in zip(buckets, found, strict=True) if bucket.digest != digest]

    def _digests(self, ranges: list[Range]) -> list[str]:
        if self._word_sums:
            return [f"{value:016x}" for value in word_sums(self.memory, ranges)]
        parts = self.memory.numpy()
        return [xxhash.xxh3_64_hexdigest(parts[offset : offset + size].data) for offset, size in ranges]

    def _whole(self, digests: list[str]) -> str:
        if self._word_sums:
            return digest_sums(self.specs, (int(digest, 16) for digest in digests))
        return digest_tensors(self.tensors())
