"""Products of FP8 matrices with scales by blocks.

A program takes a tile of tokens by outputs and goes over the inputs, 128 at a time: the tensor cores add up the FP8
products of these, and what they give is scaled and added in fp32. So no sum in their short accumulators is longer than
128 products. Where there are few tiles, the inputs are split between programs, which leave partial sums; `_join` adds
them in a fixed order.

Few tokens read the weights once, at the memory's speed. For many tokens cuBLAS has the same product (`cublas`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels import cublas
from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix
from asyncrl.precision.quantizer import SIDE

PROGRAMS = 256
"""About two for each multiprocessor."""
SHORTEST = 4
"""Blocks of inputs that a program takes at least."""


class Tile(NamedTuple):
    tokens: int
    outputs: int
    warps: int
    stages: int


TILES = {16: Tile(16, 64, 4, 5), 64: Tile(64, 64, 4, 4), 128: Tile(64, 64, 4, 3), 1 << 30: Tile(64, 128, 4, 4)}
"""By the largest number of tokens that each is for."""


@triton.jit(do_not_specialize=["tokens"])  # one kernel for all batch sizes of a tile
def _multiply(
    x,
    x_scale,
    weight,
    weight_scale,
    block_O,
    bias,
    addend,
    out,
    tokens,
    outputs,
    inputs,
    blocks,
    each,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    # Tiles of the same outputs run side by side, so that the weights come from memory once.
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    split = tl.program_id(2)
    real_t, real_o, place = token < tokens, output < outputs, tl.arange(0, 128)
    row = tl.load(block_O + output, mask=real_o, other=0) * blocks
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for number in range(split * each, tl.minimum((split + 1) * each, blocks)):
        channel = number * 128 + place
        mask_t, mask_o = real_t[:, None], real_o[:, None]
        if not EVEN:
            mask_t, mask_o = mask_t & (channel < inputs)[None, :], mask_o & (channel < inputs)[None, :]
        a = tl.load(x + token[:, None] * inputs + channel[None, :], mask=mask_t, other=0.0)
        b = tl.load(weight + output[:, None] * inputs + channel[None, :], mask=mask_o, other=0.0)
        scale_t = tl.load(x_scale + number * tokens + token, mask=real_t, other=0.0)
        scale_o = tl.load(weight_scale + row + number, mask=real_o, other=0.0)
        total += tl.dot(a, tl.trans(b)) * (scale_t[:, None] * scale_o[None, :])
    inside = real_t[:, None] & real_o[None, :]
    slot = token[:, None] * outputs + output[None, :]
    if SPLIT:
        tl.store(out + split * tokens * outputs + slot, total, mask=inside)
    else:
        if BIAS:
            total += tl.load(bias + output, mask=real_o, other=0.0).to(tl.float32)[None, :]
        if ADD:
            total += tl.load(addend + slot, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + slot, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _join(
    parts,
    bias,
    addend,
    out,
    tokens,
    outputs,
    splits,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = output < outputs, token * outputs + output
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * tokens * outputs + slot, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(addend + slot, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=inside)


def tile_for(tokens: int) -> Tile:
    return next(tile for most, tile in TILES.items() if tokens <= most)


def splits_for(tiles: int, blocks: int) -> int:
    splits = 1
    while tiles * splits < PROGRAMS and blocks // (2 * splits) >= SHORTEST:
        splits *= 2
    return splits


def multiply(
    codes: Codes,
    matrix: Fp8Matrix,
    bias_O: Tensor | None,
    addend_T_O: Tensor | None,
    out_T_O: Tensor,
    tile: Tile | None = None,
) -> None:
    (tokens, inputs), outputs = codes.values_T_I.shape, matrix.values_O_I.shape[0]
    tile = tile or tile_for(tokens)
    grid = triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs)
    blocks = triton.cdiv(inputs, SIDE)
    splits = splits_for(grid[0] * grid[1], blocks)
    found = out_T_O if splits == 1 else out_T_O.new_empty(splits, tokens, outputs, dtype=torch.float32)
    given = out_T_O if bias_O is None else bias_O, out_T_O if addend_T_O is None else addend_T_O
    kinds = {"BIAS": bias_O is not None, "ADD": addend_T_O is not None}
    _multiply[(*grid, splits)](
        *codes,
        *matrix[:3],
        *given,
        found,
        tokens,
        outputs,
        inputs,
        blocks,
        triton.cdiv(blocks, splits),
        SPLIT=splits > 1,
        EVEN=inputs % SIDE == 0,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        **kinds,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        block = min(1024, triton.next_power_of_2(outputs))
        grid = tokens, triton.cdiv(outputs, block)
        _join[grid](found, *given, out_T_O, tokens, outputs, splits, BLOCK=block, **kinds, num_warps=4)


def fp8_product(
    codes: Codes, matrix: Fp8Matrix, bias_O: Tensor | None, addend_T_O: Tensor | None, out_T_O: Tensor
) -> None:
    if out_T_O.dtype == torch.bfloat16 and bias_O is None and cublas.takes(codes, matrix):
        product_T_O = out_T_O if addend_T_O is None else torch.empty_like(out_T_O)
        if cublas.multiply(codes, matrix, product_T_O):
            if addend_T_O is not None:
                torch.add(addend_T_O, product_T_O, out=out_T_O)
            return
    multiply(codes, matrix, bias_O, addend_T_O, out_T_O)


def prepare(matrices: Iterable[Fp8Matrix]) -> None:
    """To be called once, before the first step: which product is the faster one for these."""
    cublas.prefer_where_faster(matrices, lambda codes, matrix, out_T_O: multiply(codes, matrix, None, None, out_T_O))
