"""A mixture of experts: which ones a token takes, and the products of each expert with the tokens that take it.

A token is a row for each of its experts. `sort` puts rows in tiles of one expert each, without the host: how many tiles
there are depends on the data, so there is room for as many as there can be, and those that are not needed end at once.
A program of `expert_product` takes a tile of rows by some outputs. Few tokens read each expert's weights once, at the
memory's speed. Nothing is added up in an order that may change.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Codes, Fp8Matrix, Queries, SortedRows
from asyncrl.precision.quantizer import SIDE


class Shape(NamedTuple):
    """Of a program of the products."""

    outputs: int
    inputs: int
    warps: int
    stages: int


SHAPES = {16: Shape(64, 128, 4, 3), 32: Shape(128, 128, 4, 3), 64: Shape(128, 64, 8, 3), 128: Shape(256, 64, 8, 4)}
"""By the rows of a tile: the fastest of those tried on an H200 with 128 experts of 2048 x 768."""
FP8_SHAPES = {16: Shape(64, SIDE, 4, 3), 64: Shape(128, SIDE, 4, 3)}
CHUNK = 1024
"""Rows that `sort` looks at together."""


@triton.jit
def _choose(
    logits,
    chosen,
    weight,
    X: tl.constexpr,
    X_2: tl.constexpr,
    C: tl.constexpr,
    C_2: tl.constexpr,
    RENORMALIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, X_2), tl.arange(0, C_2)
    x = tl.load(logits + token * X + expert, mask=expert < X, other=float("-inf"))
    score = tl.exp(x - tl.max(x, 0))
    score = score / tl.sum(score, 0)
    left = tl.where(expert < X, score, -1.0)
    best_C, weight_C = tl.zeros([C_2], tl.int32), tl.zeros([C_2], tl.float32)
    for number in range(C):
        best, high = tl.argmax(left, 0), tl.max(left, 0)
        best_C, weight_C = tl.where(slot == number, best, best_C), tl.where(slot == number, high, weight_C)
        left = tl.where(expert == best, -1.0, left)
    if RENORMALIZED:
        weight_C = weight_C / tl.sum(weight_C, 0)
    tl.store(chosen + token * C + slot, best_C, mask=slot < C)
    tl.store(weight + token * C + slot, weight_C, mask=slot < C)


def choose(logits_T_X: Tensor, renormalized: bool, chosen_T_C: Tensor, weight_T_C: Tensor) -> None:
    (tokens, experts), active = logits_T_X.shape, chosen_T_C.shape[1]
    _choose[(tokens,)](
        logits_T_X,
        chosen_T_C,
        weight_T_C,
        X=experts,
        X_2=triton.next_power_of_2(experts),
        C=active,
        C_2=triton.next_power_of_2(active),
        RENORMALIZED=renormalized,
        num_warps=1,
    )


@triton.jit
def _store_routes(
    chosen,
    routes,
    row_G,
    start_G,
    count_G,
    table,
    width,
    token_stride,
    C: tl.constexpr,
    C_2: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
):
    token = tl.program_id(0)
    group, column = token // width, token % width
    if column >= tl.load(count_G + group):
        return
    position = tl.load(start_G + group) + column
    page = tl.load(table + tl.load(row_G + group) * PAGES + position // PAGE).to(tl.int64)
    slot = tl.arange(0, C_2)
    found = tl.load(chosen + token.to(tl.int64) * C + slot, mask=slot < C, other=0)
    target = routes + (page * PAGE + position % PAGE) * token_stride + slot
    tl.store(target, found.to(routes.dtype.element_ty), mask=slot < C)


def store_routes(chosen_T_C: Tensor, routes_X_S_C: Tensor, queries: Queries) -> None:
    tokens, active = chosen_T_C.shape
    _store_routes[(tokens,)](
        chosen_T_C,
        routes_X_S_C,
        queries.row_G,
        queries.start_G,
        queries.count_G,
        queries.table_N_P,
        queries.width,
        routes_X_S_C.stride(1),
        C=active,
        C_2=triton.next_power_of_2(active),
        PAGE=routes_X_S_C.shape[1],
        PAGES=queries.table_N_P.shape[1],
        num_warps=1,
    )


@triton.jit(do_not_specialize=["rows", "tiles"])
def _sort(
    chosen, row_P, expert_B, rows, tiles, X: tl.constexpr, X_2: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """A program for each expert: where its tiles begin follows from how many rows each of the others has."""
    own = tl.program_id(0)
    expert, place = tl.arange(0, X_2), tl.arange(0, CHUNK)
    count_X = tl.zeros([X_2], tl.int32)
    for begin in range(0, rows, CHUNK):
        real = begin + place < rows
        found = tl.load(chosen + begin + place, mask=real, other=0)
        count_X += tl.histogram(found, X_2, mask=real)
    tiles_X = tl.where(expert < X, (count_X + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(expert < own, tiles_X, 0), 0)
    mine = tl.sum(tl.where(expert == own, tiles_X, 0), 0)
    at = first * TILE
    for begin in range(0, rows, CHUNK):
        row = begin + place
        fits = (tl.load(chosen + row, mask=row < rows, other=-1) == own).to(tl.int32)
        tl.store(row_P + at + tl.cumsum(fits, 0) - 1, row, mask=fits == 1)
        at += tl.sum(fits, 0)
    padding = at + tl.arange(0, TILE)
    tl.store(row_P + padding, padding * 0 + rows, mask=padding < (first + mine) * TILE)
    for tile in range(first, first + mine):
        tl.store(expert_B + tile, own)
    if own == X - 1:  # behind the last
        for tile in range(first + mine, tiles):
            tl.store(expert_B + tile, -1)


def sort(chosen_T_C: Tensor, experts: int, rows: SortedRows) -> None:
    _sort[(experts,)](
        chosen_T_C,
        rows.row_P,
        rows.expert_B,
        chosen_T_C.numel(),
        rows.expert_B.shape[0],
        X=experts,
        X_2=triton.next_power_of_2(experts),
        TILE=rows.tile,
        CHUNK=CHUNK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "tokens"])
def _multiply(
    x,
    x_scale,
    weight,
    weight_scale,
    block_O,
    row_P,
    expert_B,
    out,
    rows,
    tokens,
    outputs,
    inputs,
    blocks,
    active,
    FIRST: tl.constexpr,
    FP8: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # Tiles of one expert lie side by side, and run so: its weights come from memory once.
    tile = tl.program_id(0)
    expert = tl.load(expert_B + tile).to(tl.int64)
    if expert < 0:
        return
    place = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    row = tl.load(row_P + place).to(tl.int64)
    real_r = row < rows
    source = row // active if FIRST else place
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real_o = output < outputs
    weight_row = expert * outputs + output
    if FP8:
        scale_row = tl.load(block_O + weight_row, mask=real_o, other=0).to(tl.int64) * blocks
    total = tl.zeros([TILE, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        channel = begin + tl.arange(0, INPUTS)
        mask_r, mask_o = real_r[:, None], real_o[:, None]
        if not EVEN:
            mask_r, mask_o = mask_r & (channel < inputs)[None, :], mask_o & (channel < inputs)[None, :]
        a = tl.load(x + source[:, None] * inputs + channel[None, :], mask=mask_r, other=0.0)
        b = tl.load(weight + weight_row[:, None] * inputs + channel[None, :], mask=mask_o, other=0.0)
        if FP8:
            number = begin // 128
            scale_r = tl.load(x_scale + number * tokens + source, mask=real_r, other=0.0)
            scale_o = tl.load(weight_scale + scale_row + number, mask=real_o, other=0.0)
            total += tl.dot(a, tl.trans(b)) * (scale_r[:, None] * scale_o[None, :])
        elif EXACT:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total)
    target = place if FIRST else row
    inside = real_r[:, None] & real_o[None, :]
    tl.store(out + target[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty), mask=inside)


def expert_product(
    x: Tensor | Codes, matrix: Tensor | Fp8Matrix, rows: SortedRows, out_X_O: Tensor, *, first: bool
) -> None:
    values = x.values_T_I if isinstance(x, Codes) else x
    (tokens, inputs), outputs = values.shape, out_X_O.shape[1]
    if isinstance(matrix, Fp8Matrix):
        assert isinstance(x, Codes)
        x_scale, (weight, weight_scale, block_O) = x.scales_B_T, matrix[:3]
    else:
        x_scale, (weight, weight_scale, block_O) = values, (matrix, matrix, matrix)
    fp8, exact = isinstance(matrix, Fp8Matrix), values.dtype == torch.float32
    shape = (FP8_SHAPES if fp8 else SHAPES)[rows.tile]
    width = shape.inputs // 2 if exact else shape.inputs
    _multiply[(rows.expert_B.shape[0], triton.cdiv(outputs, shape.outputs))](
        values,
        x_scale,
        weight,
        weight_scale,
        block_O,
        rows.row_P,
        rows.expert_B,
        out_X_O,
        rows.rows,
        tokens,
        outputs,
        inputs,
        triton.cdiv(inputs, SIDE),
        rows.active,
        FIRST=first,
        FP8=fp8,
        EVEN=inputs % width == 0,
        EXACT=exact,
        TILE=rows.tile,
        OUTPUTS=shape.outputs,
        INPUTS=width,
        num_warps=shape.warps,
        num_stages=2 if exact else shape.stages,
    )


@triton.jit
def _add_weighted(y, weight, x, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    total = tl.load(x + token * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    for number in range(C):
        row = token * C + number
        each = tl.load(y + row * SIZE + place, mask=inside, other=0.0).to(tl.float32)
        total += each * tl.load(weight + row)
    tl.store(x + token * SIZE + place, total.to(x.dtype.element_ty), mask=inside)


def add_weighted(y_R_E: Tensor, weight_T_C: Tensor, x_T_E: Tensor) -> None:
    tokens, size = x_T_E.shape
    block = min(1024, triton.next_power_of_2(size))
    grid = tokens, triton.cdiv(size, block)
    _add_weighted[grid](y_R_E, weight_T_C, x_T_E, SIZE=size, C=weight_T_C.shape[1], BLOCK=block, num_warps=4)
