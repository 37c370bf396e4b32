"""Rotary position embedding in the rotate-half convention of Hugging Face checkpoints.

Axis suffixes: T tokens, H heads, D head dimension.

The rotation of the pair (a, b) = (x[i], x[i + D/2]) by the angle p*f is (a cos - b sin, b cos + a sin). With the
frequencies signed as [-f, f], one product gives angles whose cosine is the same for both halves and whose sine has
the sign each half needs, so that the rotation is x*cos + swap(x)*sin: three operations for all heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.models.config import Rope


def signed_frequencies(rope: Rope, head_dim: int) -> Tensor:
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        inverse = inverse / rope.factor
    if rope.type == "llama3":
        inverse = _stretch_llama3(inverse, rope)
    return torch.cat([-inverse, inverse])


def _stretch_llama3(inverse: Tensor, rope: Rope) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and blend in between."""
    turns = rope.original_positions * inverse / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""positions_T -> cosine and signed sine of every token, shaped T_1_D to broadcast over heads."""


def computed_rotation(frequencies_D: Tensor, dtype: torch.dtype) -> Rotation:
    """For any positions."""

    def rotation(positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_T_1_D = positions_T.view(-1, 1, 1) * frequencies_D
        return angles_T_1_D.cos().to(dtype), angles_T_1_D.sin().to(dtype)

    return rotation


def tabled_rotation(frequencies_D: Tensor, dtype: torch.dtype, positions: int) -> Rotation:
    """Looked up, for positions below a limit: a decoding step of a small model is short, and this is part of each."""
    cos, sin = computed_rotation(frequencies_D, dtype)(torch.arange(positions, device=frequencies_D.device))
    table_L_2_1_D = torch.stack((cos, sin), dim=1)

    def rotation(positions_T: Tensor) -> tuple[Tensor, Tensor]:
        cos_T_1_D, sin_T_1_D = table_L_2_1_D.index_select(0, positions_T).unbind(1)
        return cos_T_1_D, sin_T_1_D

    return rotation


def rotate(x_T_H_D: Tensor, cos_T_1_D: Tensor, sin_T_1_D: Tensor) -> Tensor:
    swapped_T_H_D = x_T_H_D.roll(x_T_H_D.shape[-1] // 2, dims=-1)
    return (x_T_H_D * cos_T_1_D).addcmul_(swapped_T_H_D, sin_T_1_D)
