"""Attention over pages, for one token of a row as for many: flash decoding.

A program takes one group of tokens of one row and one key/value head. The query heads that share it, times the tokens,
are the rows of one matrix product, and the pages of the row are its steps. Where there are few groups, the pages of a
row are split between programs, each of which leaves its sum and the logarithm of its weight; `_join` adds them up.

How many tokens a row has is read from the device, so one captured graph serves all lengths.

`attend` is for the pages of our own engine, `attend_last` for those of vLLM (`asyncrl.engines.vllm.attention`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.paged_loop import load, nothing, over_pages
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


class Layout(NamedTuple):
    """How keys and values lie: numbers from one page, head and token to the next, and tokens of a page."""

    page: int
    head: int
    token: int
    tokens: int
    by_channels: bool = False
    """So do values lie, in FP8 pages of our own; else like keys."""


class Scales(NamedTuple):
    """Single numbers, where keys and values are in FP8; the last where queries are, too."""

    keys: Tensor
    values: Tensor
    queries: Tensor | None = None


@triton.jit
def _group(row_G, start_G, count_G, group, LAST: tl.constexpr):
    """Row, first position and number of tokens. `LAST`: of each row its last token, and `start_G` has their lengths."""
    if LAST:
        length = tl.load(start_G + group)
        count = tl.minimum(length, 1)
        return group, length - count, count
    else:
        return tl.load(row_G + group), tl.load(start_G + group), tl.load(count_G + group)


@triton.jit
def _share(start, count, split, PAGE: tl.constexpr, SPLITS: tl.constexpr):
    """The pages of a program: from the first to the last, and up to which all queries see them to their end.

    Most are seen so, and masks cost more there than products.
    """
    pages = tl.where(count > 0, tl.cdiv(start + count, PAGE), 0)
    each = tl.cdiv(pages, SPLITS)
    first, last = split * each, tl.minimum((split + 1) * each, pages)
    return first, tl.minimum(tl.maximum((start + 1) // PAGE, first), last), last


@triton.jit
def _heat(key_scale, query_scale, SCALE: tl.constexpr, SCALED: tl.constexpr):
    """What scores are multiplied by, to be exponents of 2."""
    heat = SCALE * 1.4426950408889634
    if SCALED:
        heat *= tl.load(key_scale)
    if query_scale is not None:
        heat *= tl.load(query_scale)
    return heat


@triton.jit
def _mean(state, value_scale, SCALED: tl.constexpr, PAIRS: tl.constexpr):
    """Of the values, and what it weighs."""
    total, odd, weight, highest = state
    if PAIRS:
        total = tl.interleave(total, odd)
    weight = tl.sum(weight, 1)
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None] * (tl.load(value_scale) if SCALED else 1.0)
    return total, weight, highest


@triton.jit
def _attend(
    queries,
    keys,
    values,
    key_scale,
    value_scale,
    query_scale,
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
    QUERY: tl.constexpr,
    STRIDE: tl.constexpr,
    HEAD: tl.constexpr,
    TOKEN: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    BY_CHANNELS: tl.constexpr,
    LAST: tl.constexpr,
):
    group, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = H // K
    row, start, count = _group(row_G, start_G, count_G, group, LAST)
    first, seen, last = _share(start, count, split, PAGE, SPLITS)
    index_m, place_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    column, inside_d = index_m // SHARE, (place_d < D)[None, :]
    token = (group * width + column).to(tl.int64)
    query_head = head * SHARE + index_m % SHARE
    source = queries + token[:, None] * QUERY + query_head[:, None] * D + place_d
    q = load(source, (column < count)[:, None] & inside_d, False, SCALED)
    heat = _heat(key_scale, query_scale, SCALE, SCALED)
    PAIRS: tl.constexpr = SCALED and not BY_CHANNELS
    state = nothing(BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D, PAGE)
    k, v, line = keys + head * HEAD, values + head * HEAD, table + row * PAGES
    for MASKED in tl.static_range(2):
        begin, end = (seen, last) if MASKED else (first, seen)
        state = over_pages(
            *(state, q, heat, k, v, line, begin, end, start + column, start + count),
            *(STRIDE, TOKEN, PAGE, D, BLOCK_D, PRECISION, SCALED, BY_CHANNELS, MASKED),
        )
    total, weight, highest = _mean(state, value_scale, SCALED, PAIRS)
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
    tokens, size = pages.shape[3], pages.shape[3] * heads.dim
    layout = Layout(heads.keys * size, size, heads.dim, tokens, by_channels=scales is not None)
    given = None if scales is None else Scales(scales, scales[1:])
    _launch(qkv_T_X, (pages[0], pages[1]), given, layout, heads, queries, out_T_X, heads.dim**-0.5, plan)


def attend_last(
    query_N_H_D: Tensor,
    pages_X_K_S_2D: Tensor,
    scales: Scales | None,
    lengths_N: Tensor,
    table_N_P: Tensor,
    scale: float,
    out_N_H_D: Tensor,
    plan: Plan = PLAN,
) -> None:
    """The last token of each row, whose keys and values are stored already, each token's side by side.

    Axes of pages may lie in any order but for the last. A row of length 0 is padding and gives zeros. With scales,
    pages hold E4M3 numbers, and so do queries with one of their own.
    """
    (_, kv_heads, tokens, _), (page, head, token, _) = pages_X_K_S_2D.shape, pages_X_K_S_2D.stride()
    heads = Heads(query_N_H_D.shape[1], kv_heads, query_N_H_D.shape[2])
    pages = pages_X_K_S_2D, pages_X_K_S_2D[..., heads.dim :]
    queries = Queries(1, lengths_N, lengths_N, lengths_N, table_N_P)
    layout = Layout(page, head, token, tokens)
    _launch(query_N_H_D, pages, scales, layout, heads, queries, out_N_H_D, scale, plan, last=True)


def _launch(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    scales: Scales | None,
    layout: Layout,
    heads: Heads,
    queries: Queries,
    out: Tensor,
    scale: float,
    plan: Plan,
    *,
    last: bool = False,
) -> None:
    splits = splits_for(queries.groups, heads.keys, plan.programs)
    block_d = max(16, triton.next_power_of_2(heads.dim))
    block_m = max(16, triton.next_power_of_2(queries.width * heads.group))
    parts, log_weight, heads_of_all = out, out, queries.tokens * heads.queries
    if splits > 1:
        parts = out.new_empty(heads_of_all, splits, heads.dim, dtype=torch.float32)
        log_weight = out.new_empty(heads_of_all, splits, dtype=torch.float32)
    _attend[(queries.groups, heads.keys, splits)](
        *(q, *pages, *(scales or (out, out, None)), queries.row_G, queries.start_G, queries.count_G, queries.table_N_P),
        *(parts, log_weight, queries.width),
        SCALE=scale,
        H=heads.queries,
        K=heads.keys,
        D=heads.dim,
        QUERY=q.stride(0),
        STRIDE=layout.page,
        HEAD=layout.head,
        TOKEN=layout.token,
        PAGE=layout.tokens,
        PAGES=queries.table_N_P.stride(0),
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SCALED=scales is not None,
        BY_CHANNELS=layout.by_channels,
        LAST=last,
        num_warps=plan.warps if block_m <= 64 else 8,
        maxnreg=plan.registers if block_m == 16 else None,
        num_stages=plan.stages if q.dtype != torch.float32 else 2,
    )
    if splits > 1:
        _join[(heads_of_all,)](parts, log_weight, out, D=heads.dim, SPLITS=splits, BLOCK_D=block_d, num_warps=2)
