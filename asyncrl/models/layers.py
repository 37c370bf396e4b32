"""RMS normalisation and rotary position embedding, in few operations.

Axis suffixes: T tokens, H heads, D head dimension.

RMS normalisation: x / sqrt(|x|^2 + E eps) * (sqrt(E) weight), which is the usual formula. torch's own `rms_norm` is
eight small operations on a CPU; this is four, and its factors are made once per weight load.

Rotary embedding, in the rotate-half convention of Hugging Face checkpoints: the rotation of the pair (a, b) = (x[i],
x[i + D/2]) by the angle p*f is (a cos - b sin, b cos + a sin). With the frequencies signed as [-f, f], one product
gives angles whose cosine is the same for both halves and whose sine has the sign each half needs, so that the rotation
is x*cos + swap(x)*sin: three operations for all heads.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.models.config import Rope

Indices = npt.NDArray[np.int64]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_T_H_D, k_T_K_D, v_T_K_D) -> out_T_X, the heads side by side. It may answer for the first tokens only:
nothing more is then computed of the others, as when all that is wanted of a prompt is its keys and values."""
Exchange = Callable[[Attend], Attend]
"""Attention of some of the tokens, from one of all of them: where several ranks share a batch."""
Rotate = Callable[[Tensor], Tensor]
"""Turns heads shaped T_H_D by the angles of their tokens."""
Rotation = Callable[[Tensor], Rotate]
"""positions_T -> what turns the heads of these tokens."""


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


def computed_rotation(frequencies_D: Tensor, dtype: torch.dtype) -> Rotation:
    """For any positions."""

    def rotation(positions_T: Tensor) -> Rotate:
        angles_T_1_D = positions_T.view(-1, 1, 1) * frequencies_D
        cos_T_1_D, sin_T_1_D = angles_T_1_D.cos().to(dtype), angles_T_1_D.sin().to(dtype)

        def rotate(x_T_H_D: Tensor) -> Tensor:
            swapped_T_H_D = x_T_H_D.roll(x_T_H_D.shape[-1] // 2, dims=-1)
            return (x_T_H_D * cos_T_1_D).addcmul_(swapped_T_H_D, sin_T_1_D)

        return rotate

    return rotation


def interleaved(head_dim: int) -> Tensor:
    """The order of a head's columns in which each pair of the rotation is two neighbours."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def tabled_rotation(frequencies_D: Tensor, positions: int) -> Rotation:
    """For `interleaved` heads and positions below a limit: pairs are complex numbers, and one product turns them.

    A decoding step of a small model is short, and this is part of each.
    """
    angles_L_D = torch.arange(positions, device=frequencies_D.device)[:, None] * frequencies_D
    turns_L_1_C = torch.polar(torch.ones(()), angles_L_D[:, None, frequencies_D.shape[0] // 2 :])

    def rotation(positions_T: Tensor) -> Rotate:
        turn_T_1_C = turns_L_1_C.index_select(0, positions_T)

        def rotate(x_T_H_D: Tensor) -> Tensor:
            pairs_T_H_C = torch.view_as_complex(x_T_H_D.float().view(*x_T_H_D.shape[:2], -1, 2))
            return torch.view_as_real(pairs_T_H_C * turn_T_1_C).view(x_T_H_D.shape).to(x_T_H_D.dtype)

        return rotate

    return rotation
