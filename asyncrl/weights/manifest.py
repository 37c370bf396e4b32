"""What a policy version consists of: layout, buckets and digest as pure code, shared by every transport."""

from collections.abc import Iterable

import msgspec
import torch
import xxhash

from asyncrl.types import TensorSpec

ALIGNMENT = 64
BUCKET_BYTES = 256 << 20
"""Largest bucket: long enough for full speed, short enough to tell where a transfer broke."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]
Range = tuple[int, int]
"""Offset and size in bytes."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layout(named: NamedTensors) -> tuple[tuple[TensorSpec, ...], int]:
    """Place the tensors one after the other; returns the specs and the total size in bytes."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(specs), offset


def cut(total: int, limit: int = BUCKET_BYTES) -> list[Range]:
    """Buckets of at most `limit` bytes, a multiple of the alignment; a tensor may lie in several."""
    if limit < ALIGNMENT or limit % ALIGNMENT:
        raise ValueError(f"a bucket of {limit} bytes is no multiple of {ALIGNMENT}")
    return [(offset, min(limit, total - offset)) for offset in range(0, total, limit)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor; no copy when it is contiguous already."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest_tensors(named: NamedTensors) -> str:
    """Digest over names, shapes, dtypes and every byte, in the given order."""
    digest = xxhash.xxh3_128()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)};".encode())
        digest.update(as_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()


def digest_sums(specs: tuple[TensorSpec, ...], sums: Iterable[int]) -> str:
    """The same for bytes on a GPU: names, shapes and dtypes by hash, the bytes by their word sums (flat.py)."""
    names = xxhash.xxh3_64_hexdigest(msgspec.json.encode(specs))
    return f"{names}-{sum(sums) % 2**64:016x}"


def is_word_sum(digest: str) -> bool:
    return "-" in digest
