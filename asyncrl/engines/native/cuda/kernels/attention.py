"""Attention over pages, for one token of a row as for many: flash decoding.

A program takes one group of tokens of one row and one key/value head. The query heads that share it, times the tokens,
are the rows of one matrix product, and the pages of the row are its steps. Where there are few groups, the pages of a
row are split between programs, each of which leaves its sum and the logarithm of its weight; `_join` adds them up.

Pages in FP8 become fp16 on their way to the product, which is exact and one instruction for two numbers; the scale of
the keys is part of that of the scores, the values' comes in at the end.

How many tokens a row has is read from the device, so one captured graph serves all lengths.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Heads, Kv, Queries

MOST_SPLITS = 32


class Plan(NamedTuple):
    programs: int
    """At least, where pages can be split: enough of them read memory at full speed."""
    warps: int
    """Of a program with few queries. They share each page, and wait for each other over it."""
    stages: int
    """One more than the pages on their way at once, in a program."""
    registers: int = 128
    """Of a thread of such a program, at most: with 128, four programs of four warps fit on a multiprocessor."""


PLAN = Plan(512, 4, 3)
"""The same for pages in bf16 and in FP8; `benchmarks.fp8_kernels` compares others."""


@triton.jit
def _load(pointer, mask, EVEN: tl.constexpr, SCALED: tl.constexpr):
    """`EVEN`: there is nothing to mask."""
    x = tl.load(pointer) if EVEN else tl.load(pointer, mask=mask, other=0.0)
    return x.to(tl.float16) if SCALED else x


@triton.jit
def _load_page(keys, values, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr):
    """Keys and values, both by tokens and channels; in FP8 values lie by channels."""
    token, channel = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    place = token[:, None] * D + channel[None, :]
    inside = (channel < D)[None, :]
    k = _load(keys + place, inside, BLOCK_D == D, SCALED)
    if SCALED:
        across = channel[:, None] * PAGE + token[None, :]
        return k, tl.trans(_load(values + across, tl.trans(inside), BLOCK_D == D, SCALED))
    else:
        return k, _load(values + place, inside, BLOCK_D == D, SCALED)


@triton.jit
def _over_pages(
    state,
    q,
    heat,
    keys,
    values,
    table,
    first,
    last,
    reach_M,
    length,
    STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax in parts: what was added up so far is scaled down when a higher score comes.

    Weights are summed at the end, where warps wait for each other once. The number of the next page is asked for while
    this one is read: a page whose number is loaded in its own turn would not be on its way early.
    """
    total, weight, highest = state
    following = tl.load(table + first, mask=first < last, other=0)
    for number in tl.range(first, last, num_stages=1 if MASKED else None):
        begin = following.to(tl.int64) * STRIDE
        following = tl.load(table + number + 1, mask=number + 1 < last, other=0)
        k, v = _load_page(keys + begin, values + begin, D, PAGE, BLOCK_D, SCALED)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * heat
        if MASKED:
            position = number * PAGE + tl.arange(0, PAGE)
            score = tl.where(position[None, :] <= reach_M[:, None], score, float("-inf"))
            # What lies behind the end of a row may be no number, and even 0 times that is none.
            v = tl.where((position < length)[:, None], v, 0.0)
        higher = tl.maximum(highest, tl.max(score, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - reference[:, None])
        shrink = tl.exp2(highest - reference)[:, None]
        total = total * shrink + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        weight, highest = weight * shrink + share, higher
    return total, weight, highest


@triton.jit
def _attend(
    qkv,
    keys,
    values,
    scales,
    row_G,
    start_G,
    count_G,
    table,
    out,
    log_weight,
    width,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    group, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = H // K
    SIZE: tl.constexpr = PAGE * D
    count, start = tl.load(count_G + group), tl.load(start_G + group)
    pages = tl.where(count > 0, tl.cdiv(start + count, PAGE), 0)
    each = tl.cdiv(pages, SPLITS)
    first, last = split * each, tl.minimum((split + 1) * each, pages)
    index_m, place_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    column = index_m // SHARE
    inside_d = (place_d < D)[None, :]
    token = (group * width + column).to(tl.int64)
    query_head = head * SHARE + index_m % SHARE
    source = qkv + token[:, None] * ((H + 2 * K) * D) + query_head[:, None] * D + place_d
    q = _load(source, (column < count)[:, None] & inside_d, False, SCALED)
    heat = SCALE * 1.4426950408889634 * (tl.load(scales) if SCALED else 1.0)
    total, weight = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, PAGE], tl.float32)
    state = total, weight, tl.full([BLOCK_M], float("-inf"), tl.float32)
    k, v, line = keys + head * SIZE, values + head * SIZE, table + tl.load(row_G + group) * PAGES
    reach, length = start + column, start + count
    # Most pages are seen by all queries, to their end: masks cost more there than products.
    seen = tl.minimum(tl.maximum((start + 1) // PAGE, first), last)
    for MASKED in tl.static_range(2):
        begin, end = (seen, last) if MASKED else (first, seen)
        state = _over_pages(
            state, q, heat, k, v, line, begin, end, reach, length, K * SIZE, PAGE, D, BLOCK_D, PRECISION, SCALED, MASKED
        )
    total, weight, highest = state
    weight = tl.sum(weight, 1)
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None] * (tl.load(scales + 1) if SCALED else 1.0)
    total = tl.where((column < count)[:, None], total, 0.0)
    written = index_m < width * SHARE
    slot = (token * H + query_head) * SPLITS + split
    tl.store(out + slot[:, None] * D + place_d, total.to(out.dtype.element_ty), mask=written[:, None] & inside_d)
    if SPLITS > 1:
        # exp2(-inf) is 0: a part without keys weighs nothing
        tl.store(log_weight + slot, highest + tl.log2(weight), mask=written)


@triton.jit
def _join(parts, log_weight, out, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    place = tl.arange(0, BLOCK_D)
    inside = place < D
    weight = tl.load(log_weight + head * SPLITS + split)
    highest = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    part = tl.load(parts + (head * SPLITS + split[:, None]) * D + place[None, :], mask=inside[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * D + place, mean.to(out.dtype.element_ty), mask=inside)


def splits_for(groups: int, kv_heads: int, programs: int) -> int:
    """A power of two."""
    wanted = max(1, programs // (groups * kv_heads))
    return min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def attend(qkv_T_X: Tensor, kv: Kv, heads: Heads, queries: Queries, out_T_X: Tensor, plan: Plan = PLAN) -> None:
    pages, scales = kv
    splits = splits_for(queries.groups, heads.keys, plan.programs)
    block_d = max(16, triton.next_power_of_2(heads.dim))
    block_m = max(16, triton.next_power_of_2(queries.width * heads.group))
    parts, log_weight = out_T_X, out_T_X
    if splits > 1:
        parts = out_T_X.new_empty(queries.tokens * heads.queries, splits, heads.dim, dtype=torch.float32)
        log_weight = out_T_X.new_empty(queries.tokens * heads.queries, splits, dtype=torch.float32)
    _attend[(queries.groups, heads.keys, splits)](
        qkv_T_X,
        pages[0],
        pages[1],
        out_T_X if scales is None else scales,
        queries.row_G,
        queries.start_G,
        queries.count_G,
        queries.table_N_P,
        parts,
        log_weight,
        queries.width,
        SCALE=heads.dim**-0.5,
        H=heads.queries,
        K=heads.keys,
        D=heads.dim,
        PAGE=pages.shape[3],
        PAGES=queries.table_N_P.shape[1],
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        PRECISION="ieee" if qkv_T_X.dtype == torch.float32 else "tf32",
        SCALED=scales is not None,
        num_warps=plan.warps if block_m <= 64 else 8,
        maxnreg=plan.registers if block_m == 16 else None,
        num_stages=plan.stages if qkv_T_X.dtype != torch.float32 else 2,
    )
    if splits > 1:
        heads_of_all = queries.tokens * heads.queries
        _join[(heads_of_all,)](parts, log_weight, out_T_X, D=heads.dim, SPLITS=splits, BLOCK_D=block_d, num_warps=2)
