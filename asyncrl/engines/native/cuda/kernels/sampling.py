"""Drawing a token from each row of logits by inverting the cumulative sum, without sorting or storing probabilities.

The vocabulary is cut into blocks. One pass leaves each block's maximum and sum; a second program for each row finds
the block in which the sum reaches u * total, and in it the token. As in `asyncrl.engines.native.sampling`, 0 < u <= 1,
and the first token whose cumulative probability reaches u * total is taken, so its probability is above zero. Logits
that are not numbers give a log-probability that is none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sum_blocks(logits, temperature, highest, total, best, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + place, mask=place < V, other=float("-inf"))
    x = x / tl.where(heat == 0.0, 1.0, heat)
    high = tl.max(x, 0)
    index = row * BLOCKS + block
    tl.store(highest + index, high)
    tl.store(total + index, tl.sum(tl.exp(x - tl.where(high == float("-inf"), 0.0, high)), 0))
    tl.store(best + index, block * BLOCK + tl.argmax(x, 0))


@triton.jit
def _pick(
    logits,
    temperature,
    uniform,
    highest,
    total,
    best,
    token,
    logprob,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS_2)
    real = number < BLOCKS
    high_B = tl.load(highest + row * BLOCKS + number, mask=real, other=float("-inf"))
    high = tl.max(high_B, 0)
    weight_B = tl.load(total + row * BLOCKS + number, mask=real, other=0.0) * tl.exp(high_B - high)
    whole = tl.sum(weight_B, 0)
    wanted = tl.load(uniform + row) * whole
    reached = tl.cumsum(weight_B, 0)
    block = tl.minimum(tl.sum((reached < wanted).to(tl.int32), 0), BLOCKS - 1)
    before = tl.sum(tl.where(number < block, weight_B, 0.0), 0)

    heat = tl.load(temperature + row)
    scale = tl.where(heat == 0.0, 1.0, heat)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * V + place, mask=place < V, other=float("-inf")) / scale
    inner = tl.cumsum(tl.exp(x - high), 0)
    # The two passes round differently: what is wanted of this block is above 0 and not more than the block has.
    rest = tl.minimum(tl.maximum(wanted - before, 1e-37), tl.max(inner, 0))
    drawn = block * BLOCK + tl.sum((inner < rest).to(tl.int32), 0)
    likeliest = tl.load(best + row * BLOCKS + tl.argmax(high_B, 0))
    chosen = tl.minimum(tl.where(heat == 0.0, likeliest, drawn), V - 1)
    tl.store(token + row, chosen)
    tl.store(logprob + row, tl.load(logits + row * V + chosen) / scale - high - tl.log(whole))


def sample(logits_N_V: Tensor, temperature_N: Tensor, uniform_N: Tensor, token_N: Tensor, logprob_N: Tensor) -> None:
    rows, size = logits_N_V.shape
    block = min(BLOCK, triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block)
    highest = logits_N_V.new_empty(rows, blocks)
    total = logits_N_V.new_empty(rows, blocks)
    best = logits_N_V.new_empty(rows, blocks, dtype=torch.int32)
    shape = {"V": size, "BLOCKS": blocks, "BLOCK": block}
    _sum_blocks[(rows, blocks)](logits_N_V, temperature_N, highest, total, best, **shape, num_warps=8)
    _pick[(rows,)](
        logits_N_V,
        temperature_N,
        uniform_N,
        highest,
        total,
        best,
        token_N,
        logprob_N,
        **shape,
        BLOCKS_2=max(16, triton.next_power_of_2(blocks)),
        num_warps=8,
    )
