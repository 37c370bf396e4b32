"""What becomes of drafts, without storing probabilities: in passes over the logits that only add up blocks.

First every column draws a token as plain decoding would (`sampling.sample`). From that token and its log-probability
follows that of any other: log p(d) = log p(t) + (x_d - x_t) / temperature; the same holds for q. So `_accept`, one
program for each row, needs single logits only. Where a drawn draft was rejected, (p - q)+ is added up by blocks of the
vocabulary, and one token of it drawn as plain sampling does.
"""

import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.sampling import BLOCK, sample
from asyncrl.engines.native.cuda.kernels.shapes import Drafts


@triton.jit
def _drafted(tokens, ahead, row, column, width):
    """A row's token in a column, and its number in `ahead` if it lies there."""
    token = tl.load(tokens + row * width + column)
    number = -1 - token
    return tl.where(token < 0, tl.load(ahead + number, mask=token < 0, other=0), token), tl.maximum(number, 0)


@triton.jit
def _accept(
    logits,
    tokens,
    ahead,
    count,
    temperature,
    uniform,
    q_logprob,
    token,
    logprob,
    accepted,
    width,
    V,
    B,
    DRAWN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    scale = tl.where(heat == 0.0, 1.0, heat)
    drafted = tl.load(count + row)
    kept = 0
    for column in range(width - 1):
        place = row * width + column
        draft, number = _drafted(tokens, ahead, row, column + 1, width)
        chosen = tl.load(token + place)
        fits = draft == chosen
        x_draft = tl.load(logits + place * V + draft)
        x_chosen = tl.load(logits + place * V + chosen)
        logp = tl.load(logprob + place) + (x_draft - x_chosen) / scale
        if DRAWN:
            logq = tl.load(q_logprob + column * B + number % B)
            fits = tl.where(heat == 0.0, fits, tl.load(uniform + place) * tl.exp(logq) <= tl.exp(logp))
        if (kept == column) & (column < drafted) & fits:
            kept += 1
            tl.store(token + place, draft)
            tl.store(logprob + place, logp)
    tl.store(accepted + row, kept)


@triton.jit
def _residual(logits, token, logprob, q_logits, q_logprob, place_v, place, draft, q_row, scale, offset, V, U):
    """(p - q)+ of some tokens; `place` is a row and column, `q_row` the same of the proposals."""
    inside = offset < V
    chosen = tl.load(token + place)
    normal = tl.load(logprob + place) - tl.load(logits + place * V + chosen) / scale
    x = tl.load(logits + place * V + offset, mask=inside, other=float("-inf"))
    p = tl.exp(x / scale + normal)
    q_normal = tl.load(q_logprob + q_row) - tl.load(q_logits + q_row * U + tl.load(place_v + draft)) / scale
    where = tl.load(place_v + offset, mask=inside, other=-1)
    z = tl.load(q_logits + q_row * U + where, mask=where >= 0, other=float("-inf"))
    return tl.maximum(p - tl.exp(z / scale + q_normal), 0.0)


@triton.jit
def _sum_residual(
    logits,
    tokens,
    ahead,
    count,
    temperature,
    q_logits,
    q_logprob,
    place_v,
    token,
    logprob,
    accepted,
    total,
    width,
    V,
    U,
    B,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, last = tl.load(temperature + row), tl.load(accepted + row)
    if (heat == 0.0) | (last >= tl.load(count + row)):
        return
    draft, number = _drafted(tokens, ahead, row, last + 1, width)
    place, q_row = row * width + last, (last * B + number % B).to(tl.int64)
    offset = block * BLOCK + tl.arange(0, BLOCK)
    rest = _residual(logits, token, logprob, q_logits, q_logprob, place_v, place, draft, q_row, heat, offset, V, U)
    tl.store(total + row * BLOCKS + block, tl.sum(rest, 0))


@triton.jit
def _pick_residual(
    logits,
    tokens,
    ahead,
    count,
    temperature,
    uniform,
    q_logits,
    q_logprob,
    place_v,
    token,
    logprob,
    accepted,
    total,
    width,
    V,
    U,
    B,
    BLOCKS: tl.constexpr,
    BLOCKS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat, last = tl.load(temperature + row), tl.load(accepted + row)
    if (heat == 0.0) | (last >= tl.load(count + row)):
        return
    numbers = tl.arange(0, BLOCKS_2)
    weight_B = tl.load(total + row * BLOCKS + numbers, mask=numbers < BLOCKS, other=0.0)
    whole = tl.sum(weight_B, 0)
    if whole > 0.0:  # rounding may leave nothing where p and q agree; what was drawn from p is as good
        draft, number = _drafted(tokens, ahead, row, last + 1, width)
        place, q_row = row * width + last, (last * B + number % B).to(tl.int64)
        wanted = tl.load(uniform + place) * whole
        reached = tl.cumsum(weight_B, 0)
        block = tl.minimum(tl.sum((reached < wanted).to(tl.int32), 0), BLOCKS - 1)
        before = tl.sum(tl.where(numbers < block, weight_B, 0.0), 0)
        offset = block * BLOCK + tl.arange(0, BLOCK)
        rest = _residual(logits, token, logprob, q_logits, q_logprob, place_v, place, draft, q_row, heat, offset, V, U)
        inner = tl.cumsum(rest, 0)
        # The two passes round differently: what is wanted of this block is above 0 and not more than the block has.
        wanted = tl.minimum(tl.maximum(wanted - before, 1e-37), tl.max(inner, 0))
        drawn = tl.minimum(block * BLOCK + tl.sum((inner < wanted).to(tl.int32), 0), V - 1)
        x_chosen = tl.load(logits + place * V + tl.load(token + place))
        x_drawn = tl.load(logits + place * V + drawn)
        tl.store(logprob + place, tl.load(logprob + place) + (x_drawn - x_chosen) / heat)
        tl.store(token + place, drawn)


def verify(logits_X_V: Tensor, drafts: Drafts, token_X: Tensor, logprob_X: Tensor, accepted_N: Tensor) -> None:
    (rows, width), size = drafts.token_N_W.shape, logits_X_V.shape[1]
    temperature_X = drafts.temperature_N[:, None].expand(rows, width).contiguous()  # of one row, too
    sample(logits_X_V, temperature_X, drafts.plain_N_W.view(-1), token_X, logprob_X)
    found = drafts.proposals
    given = logits_X_V, drafts.token_N_W, drafts.ahead_W_B, drafts.count_N, drafts.temperature_N
    drafting_rows = drafts.ahead_W_B.shape[1]
    _accept[(rows,)](
        *given,
        drafts.accept_N_W,
        logprob_X if found is None else found.logprob_C_B,
        token_X,
        logprob_X,
        accepted_N,
        width,
        size,
        drafting_rows,
        DRAWN=found is not None,
        num_warps=1,
    )
    if found is None:
        return
    block = min(BLOCK, triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block)
    total = logits_X_V.new_empty(rows, blocks)
    of_q = found.logits_C_B_U, found.logprob_C_B, found.place_V, token_X, logprob_X, accepted_N, total
    sizes = width, size, found.logits_C_B_U.shape[2], drafting_rows
    _sum_residual[(rows, blocks)](*given, *of_q, *sizes, BLOCKS=blocks, BLOCK=block, num_warps=8)
    blocks_2 = max(16, triton.next_power_of_2(blocks))
    _pick_residual[(rows,)](
        *given, drafts.residual_N_W, *of_q, *sizes, BLOCKS=blocks, BLOCKS_2=blocks_2, BLOCK=block, num_warps=8
    )
