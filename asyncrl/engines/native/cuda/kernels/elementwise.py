"""Short kernels, one program for each token or part of it: embedding, RMS norm, gating.

All compute in fp32 and round where the trainer's model (asyncrl.models.decoder) rounds.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(tokens, sampled, table, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + index)
    token = tl.where(token < 0, tl.load(sampled + (-1 - token), mask=token < 0, other=0), token)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    x = tl.load(table + token.to(tl.int64) * SIZE + place, mask=inside)
    tl.store(out + index * SIZE + place, x, mask=inside)


def embed(tokens_T: Tensor, sampled_N: Tensor, embedding_V_E: Tensor, out_T_E: Tensor) -> None:
    size = embedding_V_E.shape[1]
    block = triton.next_power_of_2(size)
    _embed[(tokens_T.shape[0],)](tokens_T, sampled_N, embedding_V_E, out_T_E, SIZE=size, BLOCK=block, num_warps=4)


@triton.jit
def _rms_norm(x, weight, out, EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    value = tl.load(x + index * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS) * scale
    tl.store(out + index * SIZE + place, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x_T_E: Tensor, weight_E: Tensor, eps: float, out_T_E: Tensor) -> None:
    tokens, size = x_T_E.shape
    block = triton.next_power_of_2(size)
    warps = 8 if block >= 4096 else 4
    _rms_norm[(tokens,)](x_T_E, weight_E, out_T_E, EPS=eps, SIZE=size, BLOCK=block, num_warps=warps)


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WIDTH
    gate = tl.load(gate_up + index * 2 * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + index * 2 * WIDTH + WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + index * WIDTH + place, (silu * up).to(dtype), mask=inside)


def gated(gate_up_T_X: Tensor, out_T_F: Tensor) -> None:
    tokens, width = out_T_F.shape
    block = min(1024, triton.next_power_of_2(width))
    _gated[(tokens, triton.cdiv(width, block))](gate_up_T_X, out_T_F, WIDTH=width, BLOCK=block, num_warps=4)
