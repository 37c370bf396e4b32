"""What a policy version consists of: layout and digest as pure code, shared by every transport."""

from collections.abc import Iterable

import torch
import xxhash

from asyncrl.types import TensorSpec

ALIGNMENT = 64
CUDA_IPC = "cuda-ipc:"
"""Begins the location of weights on a GPU; any other location is a path."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor on the CPU; no copy when it is contiguous there already."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def digest_tensors(named: NamedTensors) -> str:
    """Digest over names, shapes, dtypes and every byte, in the given order."""
    digest = xxhash.xxh3_128()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)};".encode())
        digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()
