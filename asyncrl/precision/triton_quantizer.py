"""The quantizer's blocks of weights on a GPU: each is read once and written once, by a program of its own.

Bit for bit what `asyncrl.precision.quantizer` defines, but for scales below fp32's smallest normal number. Imported
only where there is a GPU, because Triton is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def e4m3(x):
    """Saturating; what is no number stays none."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)).to(tl.float8e4nv)


@triton.jit
def block_scale(largest, POWER_OF_TWO: tl.constexpr):
    scale = tl.div_rn(largest, largest * 0.0 + 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    if POWER_OF_TWO:  # up to the next: a carry out of the mantissa raises the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _quantize(x, values, scales, rows, columns, POWER_OF_TWO: tl.constexpr):
    row = (tl.program_id(0) * 128 + tl.arange(0, 128)).to(tl.int64)[:, None]
    column = tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    place, inside = row * columns + column, (row < rows) & (column < columns)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    finite = tl.min(tl.min((tl.abs(value) < float("inf")).to(tl.int32), 1), 0)
    largest = tl.max(tl.max(tl.abs(value), 1), 0) + tl.zeros([128, 1], tl.float32)
    scale = block_scale(largest, POWER_OF_TWO)
    tl.store(values + place, e4m3(tl.div_rn(value, tl.broadcast_to(scale, value.shape))), mask=inside)
    told = tl.where(finite == 1, tl.max(tl.max(scale, 1), 0), float("nan"))
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), told)


def quantize_blocks(x_N_C: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Values, and scales by blocks of 128 x 128: NaN for a block that has what is not finite."""
    x_N_C = x_N_C.contiguous()
    rows, columns = x_N_C.shape
    grid = triton.cdiv(rows, 128), triton.cdiv(columns, 128)
    values_N_C = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x_N_C.device)
    scales_B_B = torch.empty(grid, device=x_N_C.device)
    _quantize[grid](x_N_C, values_N_C, scales_B_B, rows, columns, POWER_OF_TWO=power_of_two, num_warps=8)
    return values_N_C, scales_B_B
