"""A publication's bytes in one piece of memory: a map of shared memory, a GPU's, or the receiver's own."""

from collections.abc import Iterator

import torch
import xxhash

from asyncrl.types import Bucket, TensorSpec, WeightManifest
from asyncrl.weights.manifest import BUCKET_BYTES, Range, as_bytes, cut, digest_sums, digest_tensors, is_word_sum
from asyncrl.weights.word_sum import word_sums


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
