"""FP8 by blocks: every block of a matrix has a scale of its own, so that one large number spoils one block only.

    scale = max|block| / 448            448 is the largest number of E4M3; a block of zeros has scale 1
    q     = E4M3(x / scale)             round to nearest, ties to even, saturating at 448
    x'    = q * scale                   off by at most 1/16 of x, or by scale / 1024 where x is tiny

Weights have blocks of 128 x 128 and are quantized once per policy version; activations have blocks of 1 x 128, one
token and 128 of its channels, and are quantized as they come. A scale that is a power of two (`power_of_two`, rounded
up) makes q * scale exact in any float format, and wastes up to one bit of range. Blocks at the edges of a matrix may be
smaller. Only within 1/16 of fp32's own largest number can x' be infinite.

This is the definition, in torch operations that run anywhere. Axis suffixes: N rows, C columns, O outputs of a matrix,
I its inputs, B blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.config.precision import SIDE
from asyncrl.errors import DivergenceError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
WEIGHT_BLOCK, ACTIVATION_BLOCK = (SIDE, SIDE), (1, SIDE)


class Quantized(NamedTuple):
    """A matrix in FP8. Values mean nothing without their scales: the two belong to one version."""

    values_N_C: Tensor
    scales_B_B: Tensor
    """One per block, in fp32; blocks at the edges may be smaller."""
    block: tuple[int, int]


def quantize(
    x_N_C: Tensor, block: tuple[int, int], *, name: str = "the tensor", power_of_two: bool = False
) -> Quantized:
    """Refuses what is not finite: one infinity would make the scale of its block infinite and the block zero."""
    found = quantize_unchecked(x_N_C, block, power_of_two=power_of_two)
    check_finite([(name, found.scales_B_B)])
    return found


def quantize_unchecked(x_N_C: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> Quantized:
    """Without waiting for a GPU: the scale of a block that is not finite is NaN, and `check_finite` has to see it."""
    if x_N_C.is_cuda and block == WEIGHT_BLOCK:
        from asyncrl.precision.triton_quantizer import quantize_blocks  # Triton comes with torch for GPUs only

        return Quantized(*quantize_blocks(x_N_C, power_of_two=power_of_two), block)
    x_N_C = x_N_C.float()
    largest_B_B = _largest(x_N_C, block)
    scales_B_B = torch.where(largest_B_B.isfinite(), _scales(largest_B_B, power_of_two), torch.nan)
    return Quantized(to_e4m3(x_N_C / _spread(scales_B_B, block, x_N_C)), scales_B_B, block)


def check_finite(scales: Sequence[tuple[str, Tensor]]) -> None:
    """The scales of these tensors, with one wait for all of them."""
    if not scales or bool(torch.cat([scales_B_B.flatten() for _, scales_B_B in scales]).isfinite().all()):
        return
    for name, scales_B_B in scales:
        if count := int((~scales_B_B.isfinite()).sum()):
            raise DivergenceError(
                f"{name} has values that are infinite or not a number, in {count} of its {scales_B_B.numel()} blocks, "
                "and cannot be quantized: training has diverged; go back to a checkpoint before it and lower trainer.lr"
            )


def dequantize(quantized: Quantized) -> Tensor:
    values_N_C = quantized.values_N_C.float()
    return values_N_C * _spread(quantized.scales_B_B, quantized.block, values_N_C)


def rounded(x_N_C: Tensor, *, power_of_two: bool = False) -> Tensor:
    """Activations there and back. Nothing is checked, as this is part of every step: what is no number stays none."""
    codes_N_B_S, scale_N_B_1 = _by_block(x_N_C, power_of_two)
    back_N_C = codes_N_B_S.float().mul_(scale_N_B_1).flatten(1)
    return back_N_C[:, : x_N_C.shape[1]].to(x_N_C.dtype)


def activation_codes(x_N_C: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """The same on the way there: values, and scales by rows and blocks."""
    codes_N_B_S, scale_N_B_1 = _by_block(x_N_C, power_of_two)
    return codes_N_B_S.flatten(1)[:, : x_N_C.shape[1]], scale_N_B_1[..., 0]


def _by_block(x_N_C: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x_N_C.shape
    blocks_N_B_S = F.pad(x_N_C, (0, -columns % SIDE)).view(rows, -1, SIDE).float()
    scale_N_B_1 = _scales(blocks_N_B_S.abs().amax(-1, keepdim=True), power_of_two)
    return to_e4m3(blocks_N_B_S / scale_N_B_1), scale_N_B_1


def saturated(x: Tensor, scale: float) -> Tensor:
    """There and back with a scale that was fixed before: numbers beyond 448 scales are cut off."""
    return to_e4m3(x.float() / scale).float().mul_(scale).to(x.dtype)


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3)  # clamped, as versions of torch differ in what overflow becomes


def reference_product(x: Quantized, weight: Quantized) -> Tensor:
    """x @ weight.T of the dequantized numbers; weights are outputs by inputs, as in checkpoints."""
    return dequantize(x) @ dequantize(weight).t()


def blocked_product(x: Quantized, weight: Quantized) -> Tensor:
    """The same as hardware computes it: products of FP8 numbers, block by block of inputs, scaled as they are added."""
    total_N_O = x.scales_B_B.new_zeros(len(x.values_N_C), len(weight.values_N_C))
    row_of_O = torch.arange(len(weight.values_N_C)) // weight.block[0]
    for index, start in enumerate(range(0, x.values_N_C.shape[1], SIDE)):
        inputs = slice(start, start + SIDE)
        part_N_O = x.values_N_C[:, inputs].float() @ weight.values_N_C[:, inputs].float().t()
        total_N_O += part_N_O * x.scales_B_B[:, index, None] * weight.scales_B_B[row_of_O, index]
    return total_N_O


def _largest(x_N_C: Tensor, block: tuple[int, int]) -> Tensor:
    """max|x| of each block; what is missing in blocks at the edges counts as zero."""
    (height, width), (rows, columns) = block, x_N_C.shape
    padded = F.pad(x_N_C.abs(), (0, -columns % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))


def _scales(largest: Tensor, power_of_two: bool) -> Tensor:
    scales = largest / torch.full_like(largest, LARGEST)  # by a plain number, GPUs multiply with its reciprocal
    scales = torch.where(scales == 0, 1.0, scales)  # also where the quotient of a denormal number vanishes
    if not power_of_two:
        return scales
    mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1): 0.5 is a power of two already
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def _spread(scales_B_B: Tensor, block: tuple[int, int], like_N_C: Tensor) -> Tensor:
    """To each element the scale of its block."""
    (height, width), (rows, columns) = block, like_N_C.shape
    return scales_B_B.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
