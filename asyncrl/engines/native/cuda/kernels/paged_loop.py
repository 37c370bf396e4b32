"""The steps of attention over pages: one page after the other.

Pages in FP8 become fp16 on their way to the product, which is exact and one instruction for two numbers; the scale of
the keys is part of that of the scores, the values' comes in at the end.

Products read their numbers along the sum: keys by channels, values by tokens. Single bytes cannot be turned on the way,
numbers of 16 bits can. So values in FP8 either lie by channels (pages of our own), or two neighbouring channels are
read as one number and taken apart where they are multiplied.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load(pointer, mask, EVEN: tl.constexpr, SCALED: tl.constexpr):
    """`EVEN`: there is nothing to mask."""
    x = tl.load(pointer) if EVEN else tl.load(pointer, mask=mask, other=0.0)
    return x.to(tl.float16) if SCALED else x


@triton.jit
def _apart(pairs):
    """The even and the odd of two channels, E4M3 in the low and the high byte."""
    if INTERPRETED:
        even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float16), odd.to(tl.float16)
    else:
        # The same for two tokens at once; the lines above make a step of 458 instructions, this one of 345.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _load_page(
    keys,
    values,
    TOKEN: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALED: tl.constexpr,
    BY_CHANNELS: tl.constexpr,
):
    """Keys and values, both by tokens and channels, or by tokens and pairs of channels."""
    token, channel = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    place = token[:, None] * TOKEN + channel[None, :]
    inside = (channel < D)[None, :]
    EVEN: tl.constexpr = BLOCK_D == D
    k = load(keys + place, inside, EVEN, SCALED)
    if BY_CHANNELS:
        across = channel[:, None] * PAGE + token[None, :]
        return k, tl.trans(load(values + across, tl.trans(inside), EVEN, SCALED))
    elif SCALED:
        pair = tl.arange(0, BLOCK_D // 2)[None, :]
        pairs = values.to(tl.pointer_type(tl.uint16)) + token[:, None] * (TOKEN // 2) + pair
        return k, tl.load(pairs) if EVEN else tl.load(pairs, mask=pair < D // 2, other=0)
    else:
        return k, load(values + place, inside, EVEN, SCALED)


@triton.jit
def nothing(M: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """The state before the first page: sums of values and of weights, and the highest score."""
    total = tl.zeros([M, D], tl.float32)
    return total, total, tl.zeros([M, PAGE], tl.float32), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def over_pages(
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
    TOKEN: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    BY_CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax in parts: what was added up so far is scaled down when a higher score comes.

    Weights are summed at the end, where warps wait for each other once. The number of the next page is asked for while
    this one is read: a page whose number is loaded in its own turn would not be on its way early. `odd` is only there
    for pairs of channels.
    """
    total, odd, weight, highest = state
    following = tl.load(table + first, mask=first < last, other=0)
    for number in tl.range(first, last, num_stages=1 if MASKED else None):
        begin = following.to(tl.int64) * STRIDE
        following = tl.load(table + number + 1, mask=number + 1 < last, other=0)
        k, v = _load_page(keys + begin, values + begin, TOKEN, PAGE, D, BLOCK_D, SCALED, BY_CHANNELS)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * heat
        if MASKED:
            position = number * PAGE + tl.arange(0, PAGE)
            score = tl.where(position[None, :] <= reach_M[:, None], score, float("-inf"))
            # What lies behind the end of a row may be no number, and even 0 times that is none.
            v = tl.where((position < length)[:, None], v, 0)
        higher = tl.maximum(highest, tl.max(score, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - reference[:, None])
        shrink = tl.exp2(highest - reference)[:, None]
        if SCALED and not BY_CHANNELS:
            v, v_odd = _apart(v)
            odd = odd * shrink + tl.dot(share.to(v.dtype), v_odd)
        total = total * shrink + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        weight, highest = weight * shrink + share, higher
    return total, odd, weight, highest
