"""Normalise and rotate queries and keys in place, and write keys and values into their pages.

One program for each head of each token. Heads come in the order of the fused projection: queries, keys, values. The
pairs of the rotation are i and i + D/2, as in checkpoints, so that loading weights is a plain copy.
"""

import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Heads, Kv, Queries
from asyncrl.precision.triton_quantizer import e4m3


@triton.jit
def _write(target, a, b, inside, scales, APART: tl.constexpr, SCALED: tl.constexpr):
    """Both halves of a head, so far apart."""
    if SCALED:
        scale = tl.load(scales) + tl.zeros(a.shape, tl.float32)
        tl.store(target, e4m3(tl.div_rn(a.to(tl.float32), scale)), mask=inside)
        tl.store(target + APART, e4m3(tl.div_rn(b.to(tl.float32), scale)), mask=inside)
    else:
        tl.store(target, a, mask=inside)
        tl.store(target + APART, b, mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    norms,
    keys,
    values,
    scales,
    row_G,
    start_G,
    count_G,
    table,
    width,
    EPS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    group, column = token // width, token % width
    if column >= tl.load(count_G + group):
        return
    position = tl.load(start_G + group) + column
    place = tl.arange(0, HALF)
    inside = place < D // 2
    source = qkv + token.to(tl.int64) * ((H + 2 * K) * D) + head * D
    a = tl.load(source + place, mask=inside, other=0.0)
    b = tl.load(source + D // 2 + place, mask=inside, other=0.0)
    dtype = qkv.dtype.element_ty
    if head < H + K:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            kind = head // H  # 0 for queries, 1 for keys, of which there are no more than queries
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + EPS)
            norm = norms + kind * D + place
            a = (a * scale * tl.load(norm, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
            b = (b * scale * tl.load(norm + D // 2, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        turn = position * (D // 2) + place
        c = tl.load(cos + turn, mask=inside, other=0.0)
        s = tl.load(sin + turn, mask=inside, other=0.0)
        rotated = (a * c - b * s).to(dtype)
        b = (b * c + a * s).to(dtype)
        a = rotated
    if head < H:
        _write(source + place, a, b, inside, scales, D // 2, False)
    else:
        row = tl.load(row_G + group)
        page = tl.load(table + row * PAGES + position // PAGE).to(tl.int64)
        begin, line = page * (K * PAGE * D) + (head - H) % K * (PAGE * D), position % PAGE
        if head < H + K:
            _write(keys + begin + line * D + place, a, b, inside, scales, D // 2, SCALED)
        elif SCALED:
            _write(values + begin + place * PAGE + line, a, b, inside, scales + 1, D // 2 * PAGE, SCALED)
        else:
            _write(values + begin + line * D + place, a, b, inside, scales, D // 2, SCALED)


def rotate_and_store(
    qkv_T_X: Tensor,
    turns_2_L_C: Tensor,
    norm_2_D: Tensor | None,
    eps: float,
    kv: Kv,
    heads: Heads,
    queries: Queries,
) -> None:
    pages, scales = kv
    _rotate_and_store[(queries.tokens, heads.all)](
        qkv_T_X,
        turns_2_L_C[0],
        turns_2_L_C[1],
        turns_2_L_C if norm_2_D is None else norm_2_D,
        pages[0],
        pages[1],
        turns_2_L_C if scales is None else scales,
        queries.row_G,
        queries.start_G,
        queries.count_G,
        queries.table_N_P,
        queries.width,
        EPS=eps,
        H=heads.queries,
        K=heads.keys,
        D=heads.dim,
        HALF=triton.next_power_of_2(heads.dim // 2),
        PAGE=pages.shape[3],
        PAGES=queries.table_N_P.shape[1],
        NORM=norm_2_D is not None,
        SCALED=scales is not None,
        num_warps=1,
    )
