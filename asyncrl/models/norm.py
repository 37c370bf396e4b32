"""RMS normalisation in few operations: x / sqrt(|x|^2 + E eps) * (sqrt(E) weight), which is the usual formula.

torch's own `rms_norm` is eight small operations on a CPU; this is four, and its factors are made once per weight load.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NormScale(NamedTuple):
    """Weight and epsilon of a normalisation over the last axis, of size E."""

    scale: Tensor | None
    """sqrt(E) weight, in fp32; None where it was multiplied into what reads the result."""
    floor: Tensor
    """sqrt(E eps)."""

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "NormScale":
        size = weight.shape[-1]
        # Filled in where it is: copying a number to a GPU would wait for it, three times in every layer.
        return cls(weight.float() * size**0.5, torch.full((), (size * eps) ** 0.5, device=weight.device))

    def unscaled(self) -> "NormScale":
        return NormScale(None, self.floor)


def rms_norm(x: Tensor, norm: NormScale) -> Tensor:
    if x.dtype != torch.float32:
        return rms_norm(x.float(), norm).to(x.dtype)
    x = x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), norm.floor)
    return x if norm.scale is None else x * norm.scale
