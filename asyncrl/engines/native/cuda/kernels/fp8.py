"""Activations in FP8, one program for each token or part of it: plain, behind an RMS norm, behind gating.

Results of norm and gating are rounded as where nothing is quantized, so that FP8 is the only difference.
"""

import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Codes
from asyncrl.precision.quantizer import SIDE
from asyncrl.precision.triton_quantizer import block_scale, e4m3

LINES = 16
"""Blocks of a program that takes a part of a token."""


@triton.jit
def _store(x_L_S, values, scales, token, line, place, inside, tokens, BLOCKS: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Lines are blocks of 128 channels."""
    scale = block_scale(tl.max(tl.abs(x_L_S), 1), POWER_OF_TWO)
    code = e4m3(tl.div_rn(x_L_S, tl.broadcast_to(scale[:, None], x_L_S.shape)))
    tl.store(values + place, code, mask=inside)
    tl.store(scales + line * tokens + token, scale, mask=line < BLOCKS)


@triton.jit(do_not_specialize=["tokens"])
def _quantize(
    x, values, scales, tokens, SIZE: tl.constexpr, BLOCKS: tl.constexpr, LINES: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    channel = line[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside, place = channel < SIZE, token * SIZE + channel
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    _store(value, values, scales, token, line, place, inside, tokens, BLOCKS, POWER_OF_TWO)


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm(
    x,
    weight,
    values,
    scales,
    tokens,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, LINES)
    channel = line[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside, place = channel < SIZE, token * SIZE + channel
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(tl.sum(value * value, 1), 0)
    value = (value * tl.rsqrt(square / SIZE + EPS) * norm).to(x.dtype.element_ty).to(tl.float32)
    _store(value, values, scales, token, line, place, inside, tokens, BLOCKS, POWER_OF_TWO)


@triton.jit(do_not_specialize=["tokens"])
def _gated(
    gate_up,
    values,
    scales,
    tokens,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    channel = line[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = channel < WIDTH
    dtype = gate_up.dtype.element_ty
    source = gate_up + token * 2 * WIDTH + channel
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    _store(value, values, scales, token, line, token * WIDTH + channel, inside, tokens, BLOCKS, POWER_OF_TWO)


def quantize(x_T_I: Tensor, codes: Codes, power_of_two: bool) -> None:
    tokens, size = x_T_I.shape
    blocks = codes.scales_B_T.shape[0]
    lines = min(LINES, triton.next_power_of_2(blocks))
    _quantize[(tokens, triton.cdiv(blocks, lines))](
        x_T_I, *codes, tokens, SIZE=size, BLOCKS=blocks, LINES=lines, POWER_OF_TWO=power_of_two, num_warps=4
    )


def rms_norm_quantized(x_T_E: Tensor, weight_E: Tensor, eps: float, codes: Codes, power_of_two: bool) -> None:
    tokens, size = x_T_E.shape
    lines = triton.next_power_of_2(triton.cdiv(size, SIDE))
    sizes = {"SIZE": size, "BLOCKS": codes.scales_B_T.shape[0], "LINES": lines, "POWER_OF_TWO": power_of_two}
    _rms_norm[(tokens,)](x_T_E, weight_E, *codes, tokens, EPS=eps, **sizes, num_warps=8 if lines >= 32 else 4)


def gated_quantized(gate_up_T_X: Tensor, codes: Codes, power_of_two: bool) -> None:
    tokens, width = codes.values_T_I.shape
    blocks = codes.scales_B_T.shape[0]
    lines = min(LINES, triton.next_power_of_2(blocks))
    _gated[(tokens, triton.cdiv(blocks, lines))](
        gate_up_T_X, *codes, tokens, WIDTH=width, BLOCKS=blocks, LINES=lines, POWER_OF_TWO=power_of_two, num_warps=4
    )
