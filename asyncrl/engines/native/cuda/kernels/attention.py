"""Attention over pages, for one token of a row as for many: flash decoding.

A program takes one group of tokens of one row and one key/value head. The query heads that share it, times the tokens,
are the rows of one matrix product, and the pages of the row are its steps. Where there are few groups, the pages of a
row are split between programs, each of which leaves its sum and the logarithm of its weight; `_join` adds them up.

Pages in FP8 become fp16 on their way to the product, which is exact and one instruction; the scale of the keys is part
of that of the scores, the values' comes in at the end.

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
    """Pages on their way at once, in a program."""


PLANS = {False: Plan(512, 4, 3), True: Plan(1024, 4, 4)}
"""By whether pages are in FP8. Those are read in half the time, so the work for each counts for more: more programs
hide it, and as they are smaller one more is on its way. `benchmarks.fp8_kernels` compares others."""


@triton.jit
def _accumulate(total, weight, highest, score, v, PRECISION: tl.constexpr):
    """Softmax in parts: what was added up so far is scaled down when a higher score comes."""
    higher = tl.maximum(highest, tl.max(score, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(score - reference[:, None])
    shrink = tl.exp2(highest - reference)
    total = total * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
    return total, weight * shrink + tl.sum(share, 1), higher


@triton.jit
def _load(pointer, mask, SCALED: tl.constexpr):
    x = tl.load(pointer, mask=mask, other=0.0)
    return x.to(tl.float16) if SCALED else x


@triton.jit
def _load_values(pointer, real, inside, SCALED: tl.constexpr):
    """FP8 is masked as fp16: the product then reads fp16 across pages from shared memory, instead of single bytes."""
    if SCALED:
        return tl.where(real, tl.load(pointer, mask=inside, other=0.0).to(tl.float16), 0.0)
    else:
        return tl.load(pointer, mask=real & inside, other=0.0)


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
    count, start = tl.load(count_G + group), tl.load(start_G + group)
    length = start + count
    pages = tl.where(count > 0, tl.cdiv(length, PAGE), 0)
    each = tl.cdiv(pages, SPLITS)
    pages_of_row = table + tl.load(row_G + group) * PAGES
    index_m, place_d, place_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    column = index_m // SHARE
    real_m = column < count
    inside_d = place_d < D
    token = (group * width + column).to(tl.int64)
    query_head = head * SHARE + index_m % SHARE
    source = qkv + token[:, None] * ((H + 2 * K) * D) + query_head[:, None] * D + place_d
    q = _load(source, real_m[:, None] & inside_d[None, :], SCALED)
    heat = SCALE * 1.4426950408889634 * (tl.load(scales) if SCALED else 1.0)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for number in range(split * each, tl.minimum((split + 1) * each, pages)):
        page = tl.load(pages_of_row + number).to(tl.int64)
        position = number * PAGE + place_n
        place = page * (K * PAGE * D) + head * (PAGE * D) + place_n[:, None] * D + place_d[None, :]
        k = _load(keys + place, inside_d[None, :], SCALED)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * heat
        score = tl.where(real_m[:, None] & (position[None, :] <= start + column[:, None]), score, float("-inf"))
        # What lies behind the end of a row may be no number, and even 0 times that is none.
        v = _load_values(values + place, (position < length)[:, None], inside_d[None, :], SCALED)
        total, weight, highest = _accumulate(total, weight, highest, score, v, PRECISION)
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None] * (tl.load(scales + 1) if SCALED else 1.0)
    written = (index_m < width * SHARE)[:, None] & inside_d[None, :]
    slot = (token * H + query_head) * SPLITS + split
    tl.store(out + slot[:, None] * D + place_d, total.to(out.dtype.element_ty), mask=written)
    if SPLITS > 1:
        # exp2(-inf) is 0: a part without keys weighs nothing
        tl.store(log_weight + slot, highest + tl.log2(weight), mask=index_m < width * SHARE)


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


def attend(qkv_T_X: Tensor, kv: Kv, heads: Heads, queries: Queries, out_T_X: Tensor, plan: Plan | None = None) -> None:
    pages, scales = kv
    plan = plan or PLANS[scales is not None]
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
        num_stages=plan.stages if qkv_T_X.dtype != torch.float32 else 2,
    )
    if splits > 1:
        heads_of_all = queries.tokens * heads.queries
        _join[(heads_of_all,)](parts, log_weight, out_T_X, D=heads.dim, SPLITS=splits, BLOCK_D=block_d, num_warps=2)
