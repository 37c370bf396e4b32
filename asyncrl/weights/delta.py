"""Sparse deltas: only the elements that differ from an earlier publication, bit for bit.

Few of a policy's bf16 weights change in one step: an update is often smaller than the distance to the next number. An
element costs its value and a place of four bytes, so this pays below a third of changed bf16, or half of changed fp32.
"""

import torch

from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import NamedTensors

INDICES, VALUES = "#indices", "#values"
INDEX = torch.int32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(old: Flat, new: Flat) -> dict[str, torch.Tensor] | None:
    """Places and new values for each tensor that differs; None if every byte takes no more room than that."""
    if old.specs != new.specs or any(size > torch.iinfo(INDEX).max for size in _elements(new)):
        return None
    found: dict[str, torch.Tensor] = {}
    room = len(new.memory)
    for (name, before), (_, after) in zip(old.tensors(), new.tensors(), strict=True):
        indices = (_bits(before) != _bits(after)).nonzero().squeeze(1)
        room -= len(indices) * (INDEX.itemsize + after.element_size())
        if room <= 0:
            return None
        if len(indices):
            found[name + INDICES] = indices.to(INDEX)
            found[name + VALUES] = after.reshape(-1)[indices]
    return found


def apply(base: Flat, changed: NamedTensors) -> None:
    """Turn the publication that the changes were made from into the new one, in place."""
    found = dict(changed)
    for name, tensor in base.tensors():
        if name + INDICES in found:
            indices = found[name + INDICES].to(tensor.device, torch.int64)
            _bits(tensor)[indices] = _bits(found[name + VALUES].to(tensor.device))


def _elements(flat: Flat) -> list[int]:
    return [spec.bytes // getattr(torch, spec.dtype).itemsize for spec in flat.specs]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: two numbers that compare equal, such as 0.0 and -0.0, may differ in their bits."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])
