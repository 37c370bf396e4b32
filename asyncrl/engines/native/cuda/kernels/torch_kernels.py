"""The kernels in plain torch: what those in Triton are compared with, and what runs where there is no GPU.

In the order of `Kernels`: a step from embedding to sampling, then what FP8 and experts add.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.engines.native import sampling
from asyncrl.engines.native.cuda.kernels.shapes import (
    Codes,
    Drafts,
    Fp8Matrix,
    Heads,
    Kernels,
    Kv,
    Merge,
    Move,
    Proposals,
    Queries,
    SortedRows,
)
from asyncrl.models import lora
from asyncrl.precision.quantizer import SIDE, WEIGHT_BLOCK, activation_codes, quantize_unchecked, to_e4m3
from asyncrl.weights.flat import Flat


def embed(tokens_T: Tensor, sampled_N: Tensor, embedding_V_E: Tensor, out_T_E: Tensor) -> None:
    earlier_T = sampled_N[(-1 - tokens_T).clamp(min=0).long()]
    out_T_E.copy_(embedding_V_E[torch.where(tokens_T < 0, earlier_T, tokens_T).long()])


def rms_norm(x_T_E: Tensor, weight_E: Tensor, eps: float, out_T_E: Tensor) -> None:
    x = x_T_E.float()
    out_T_E.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_E.float())


def gated(gate_up_T_X: Tensor, out_T_F: Tensor) -> None:
    gate_T_F, up_T_F = gate_up_T_X.chunk(2, -1)
    out_T_F.copy_(F.silu(gate_T_F) * up_T_F)


def rotate_and_store(
    qkv_T_X: Tensor,
    turns_2_L_C: Tensor,
    norm_2_D: Tensor | None,
    eps: float,
    kv: Kv,
    heads: Heads,
    queries: Queries,
) -> None:
    position_T, real_T = _positions(queries)
    qkv_T_H_D = qkv_T_X.view(-1, heads.all, heads.dim)
    parts = qkv_T_H_D.split([heads.queries, heads.keys, heads.keys], 1)
    turn_2_T_1_C = turns_2_L_C[:, position_T.clamp(max=turns_2_L_C.shape[1] - 1), None]
    for kind, part in enumerate(parts[:2]):
        if norm_2_D is not None:
            rms_norm(part.clone(), norm_2_D[kind], eps, part)
        a, b = part.float().chunk(2, -1)
        part.copy_(
            torch.cat([a * turn_2_T_1_C[0] - b * turn_2_T_1_C[1], b * turn_2_T_1_C[0] + a * turn_2_T_1_C[1]], -1)
        )
    size = kv.pages_2_X_K_S_D.shape[3]
    row_T, place_T = queries.row_G.repeat_interleave(queries.width)[real_T], position_T[real_T]
    page_T = queries.table_N_P[row_T, place_T // size]
    for kind, (pages, part) in enumerate(zip(kv.parts, parts[1:], strict=True)):
        real = part[real_T]
        if kv.scales_2 is not None:  # as bytes, because torch cannot scatter FP8 everywhere
            real, pages = to_e4m3(real.float() / kv.scales_2[kind]).view(torch.uint8), pages.view(torch.uint8)
        pages[page_T, :, place_T % size] = real


def attend(qkv_T_X: Tensor, kv: Kv, heads: Heads, queries: Queries, out_T_X: Tensor) -> None:
    groups, width = queries.groups, queries.width
    position_T, real_T = _positions(queries)
    size = kv.pages_2_X_K_S_D.shape[3]
    pages = -(-int((queries.start_G + queries.count_G).max()) // size)
    table_G_P = queries.table_N_P[queries.row_G, :pages]
    k_G_K_L_D, v_G_K_L_D = (held[table_G_P].transpose(1, 2).flatten(2, 3).float() for held in kv.parts)
    if kv.scales_2 is not None:
        k_G_K_L_D, v_G_K_L_D = k_G_K_L_D * kv.scales_2[0], v_G_K_L_D * kv.scales_2[1]
    seen_G_1_W_L = (torch.arange(pages * size, device=qkv_T_X.device) <= position_T[:, None]).view(groups, 1, width, -1)
    q_G_H_W_D = qkv_T_X.view(groups, width, heads.all, heads.dim)[:, :, : heads.queries].transpose(1, 2).float()
    out_G_H_W_D = F.scaled_dot_product_attention(
        q_G_H_W_D, k_G_K_L_D, v_G_K_L_D, attn_mask=seen_G_1_W_L, enable_gqa=True
    )
    out_T_X.copy_(out_G_H_W_D.transpose(1, 2).reshape(groups * width, -1).masked_fill(~real_T[:, None], 0.0))


def sample(logits_N_V: Tensor, temperature_N: Tensor, uniform_N: Tensor, token_N: Tensor, logprob_N: Tensor) -> None:
    greedy_N_1 = temperature_N[:, None] == 0
    settings = sampling.RowSettings(torch.where(greedy_N_1, 1.0, temperature_N[:, None]), greedy_N_1)
    token_N_1, logprob_N_1 = sampling.sample(logits_N_V, settings, uniform_N[:, None])
    token_N.copy_(token_N_1[:, 0])
    logprob_N.copy_(logprob_N_1[:, 0])


def verify(logits_X_V: Tensor, drafts: Drafts, token_X: Tensor, logprob_X: Tensor, accepted_N: Tensor) -> None:
    rows, width = drafts.token_N_W.shape
    temperature_X = drafts.temperature_N.repeat_interleave(width)
    sample(logits_X_V, temperature_X, drafts.plain_N_W.reshape(-1), token_X, logprob_X)
    heat_X_1 = torch.where(temperature_X == 0, 1.0, temperature_X)[:, None]
    logp_N_W_V = (logits_X_V / heat_X_1).log_softmax(-1).view(rows, width, -1)
    given_N_W, chosen_N_W = drafts.token_N_W.long(), token_X.view(rows, width)
    ahead_N_W = drafts.ahead_W_B.reshape(-1)[(-1 - given_N_W).clamp(min=0)]
    draft_N_C = torch.where(given_N_W < 0, ahead_N_W, given_N_W)[:, 1:].long()
    fits_N_C = draft_N_C == chosen_N_W[:, :-1]
    if drafts.proposals is not None:
        passes_N_C = _passes(logp_N_W_V, draft_N_C, drafts, drafts.proposals)
        fits_N_C = torch.where(drafts.temperature_N[:, None] == 0, fits_N_C, passes_N_C)
    fits_N_C &= torch.arange(width - 1, device=fits_N_C.device) < drafts.count_N[:, None]
    accepted_N.copy_(fits_N_C.long().cumprod(1).sum(1))
    if drafts.proposals is not None:
        _replace_rejected(logp_N_W_V, drafts, drafts.proposals, chosen_N_W, accepted_N)
    kept_N_C = torch.arange(width - 1, device=fits_N_C.device) < accepted_N[:, None]
    chosen_N_W[:, :-1] = torch.where(kept_N_C, draft_N_C, chosen_N_W[:, :-1])
    logprob_X.copy_(logp_N_W_V.gather(2, chosen_N_W.long()[:, :, None]).flatten())


def _passes(logp_N_W_V: Tensor, draft_N_C: Tensor, drafts: Drafts, proposals: Proposals) -> Tensor:
    """Whether each draft passes min(1, p/q)."""
    logp_N_C = logp_N_W_V[:, :-1].gather(2, draft_N_C[:, :, None])[..., 0]
    q_N_C = proposals.logprob_C_B[: draft_N_C.shape[1], drafted_in(drafts)].t().exp()
    return drafts.accept_N_W[:, :-1] * q_N_C <= logp_N_C.exp()


def _replace_rejected(
    logp_N_W_V: Tensor, drafts: Drafts, proposals: Proposals, chosen_N_W: Tensor, accepted_N: Tensor
) -> None:
    """Where a drawn draft was rejected, the token behind the last column comes from (p - q)+."""
    index_N, last_N = torch.arange(len(accepted_N), device=accepted_N.device), accepted_N.long()
    rejected_N = (accepted_N < drafts.count_N) & (drafts.temperature_N > 0)
    heat_N_1 = torch.where(drafts.temperature_N == 0, 1.0, drafts.temperature_N)[:, None]
    place_N = last_N.clamp(max=proposals.logits_C_B_U.shape[0] - 1)
    q_N_U = (proposals.logits_C_B_U[place_N, drafted_in(drafts)] / heat_N_1).softmax(-1)
    q_N_V = q_N_U[:, proposals.place_V.clamp(min=0).long()] * (proposals.place_V >= 0)
    residual_N_V = (logp_N_W_V[index_N, last_N].exp() - q_N_V).clamp_(min=0)
    replaced_N = rejected_N & (residual_N_V.sum(1) > 0)  # rounding may leave nothing; what was drawn from p is as good
    drawn_N = sampling.draw(residual_N_V, drafts.residual_N_W[index_N, last_N][:, None])[:, 0]
    chosen_N_W[index_N, last_N] = torch.where(replaced_N, drawn_N, chosen_N_W[index_N, last_N]).int()


def drafted_in(drafts: Drafts) -> Tensor:
    """The row of the step before that each row's draft was made in."""
    return (-1 - drafts.token_N_W[:, 1]).clamp(min=0).long() % drafts.ahead_W_B.shape[1]


def mover(moves: Sequence[Move]) -> Callable[[Flat], None]:
    def run(flat: Flat) -> None:
        for move in moves:
            move.make(flat)

    return run


def merger(merges: Sequence[Merge]) -> Callable[[Flat], None]:
    def run(flat: Flat) -> None:
        for merge in merges:
            down_M_R_I, up_M_O_R = (flat.tensor(spec).flatten(0, -3) for spec in (merge.down, merge.up))
            for place, (number, target_O_I) in enumerate(zip(merge.numbers, merge.targets, strict=True)):
                merged_O_I = lora.merge(merge.base_M_O_I[number], down_M_R_I[number], up_M_O_R[number])
                if not merge.scales:
                    target_O_I.copy_(merged_O_I)
                    continue
                found = quantize_unchecked(merged_O_I, WEIGHT_BLOCK, power_of_two=merge.power_of_two)
                target_O_I.view(torch.uint8).copy_(found.values_N_C.view(torch.uint8))
                merge.scales[place].copy_(found.scales_B_B)

    return run


def _positions(queries: Queries) -> tuple[Tensor, Tensor]:
    """Of the flat tokens, and which of them are real."""
    column_W = torch.arange(queries.width, device=queries.row_G.device)
    position_T = (queries.start_G[:, None] + column_W).flatten()
    return position_T, (column_W < queries.count_G[:, None]).flatten()


def quantize(x_T_I: Tensor, codes: Codes, power_of_two: bool) -> None:
    values_T_I, scales_T_B = activation_codes(x_T_I, power_of_two=power_of_two)
    codes.values_T_I.copy_(values_T_I)
    codes.scales_B_T.copy_(scales_T_B.t())


class Quantizing(NamedTuple):
    """What other kernels compute, quantized."""

    plain_rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    plain_gated: Callable[[Tensor, Tensor], None]

    def rms_norm(self, x_T_E: Tensor, weight_E: Tensor, eps: float, codes: Codes, power_of_two: bool) -> None:
        normed_T_E = torch.empty_like(x_T_E)
        self.plain_rms_norm(x_T_E, weight_E, eps, normed_T_E)
        quantize(normed_T_E, codes, power_of_two)

    def gated(self, gate_up_T_X: Tensor, codes: Codes, power_of_two: bool) -> None:
        y_T_F = gate_up_T_X.new_empty(codes.values_T_I.shape)
        self.plain_gated(gate_up_T_X, y_T_F)
        quantize(y_T_F, codes, power_of_two)


def fp8_product(
    codes: Codes, matrix: Fp8Matrix, bias_O: Tensor | None, addend_T_O: Tensor | None, out_T_O: Tensor
) -> None:
    total_T_O = _numbers(codes) @ _matrix_numbers(matrix).t()
    for more in (bias_O, addend_T_O):
        if more is not None:
            total_T_O += more.float()
    out_T_O.copy_(total_T_O)


def _numbers(codes: Codes) -> Tensor:
    inputs = codes.values_T_I.shape[1]
    return codes.values_T_I.float() * codes.scales_B_T.t().repeat_interleave(SIDE, 1)[:, :inputs]


def _matrix_numbers(matrix: Fp8Matrix) -> Tensor:
    inputs = matrix.values_O_I.shape[1]
    return matrix.values_O_I.float() * matrix.scales_X_B[matrix.block_O.long()].repeat_interleave(SIDE, 1)[:, :inputs]


def choose(logits_T_X: Tensor, renormalized: bool, chosen_T_C: Tensor, weight_T_C: Tensor) -> None:
    weight, chosen = logits_T_X.softmax(-1).topk(chosen_T_C.shape[1], dim=-1)
    chosen_T_C.copy_(chosen)
    weight_T_C.copy_(weight / weight.sum(-1, keepdim=True) if renormalized else weight)


def store_routes(chosen_T_C: Tensor, routes_X_S_C: Tensor, queries: Queries) -> None:
    position_T, real_T = _positions(queries)
    row_T, place_T = queries.row_G.repeat_interleave(queries.width)[real_T], position_T[real_T]
    size = routes_X_S_C.shape[1]
    page_T = queries.table_N_P[row_T, place_T // size]
    routes_X_S_C[page_T, place_T % size] = chosen_T_C[real_T].to(routes_X_S_C.dtype)


def sort(chosen_T_C: Tensor, experts: int, rows: SortedRows) -> None:
    rows.expert_B.fill_(-1)
    rows.row_P.fill_(rows.rows)
    tile = 0
    for expert in range(experts):
        own = (chosen_T_C.flatten() == expert).nonzero().flatten()
        rows.row_P[tile * rows.tile : tile * rows.tile + len(own)] = own.int()
        tiles = -(-len(own) // rows.tile)
        rows.expert_B[tile : tile + tiles] = expert
        tile += tiles


def expert_product(
    x: Tensor | Codes, matrix: Tensor | Fp8Matrix, rows: SortedRows, out_X_O: Tensor, *, first: bool
) -> None:
    outputs = out_X_O.shape[1]
    x_T_I = _numbers(x) if isinstance(x, Codes) else x
    weight_O_I = _matrix_numbers(matrix) if isinstance(matrix, Fp8Matrix) else matrix
    for tile, expert in enumerate(rows.expert_B.tolist()):
        if expert < 0:
            continue
        places = torch.arange(tile * rows.tile, (tile + 1) * rows.tile, device=x_T_I.device)
        row = rows.row_P[places].long()
        places, row = places[row < rows.rows], row[row < rows.rows]
        source, target = (row // rows.active, places) if first else (places, row)
        product = x_T_I[source] @ weight_O_I[expert * outputs : (expert + 1) * outputs].t()
        out_X_O[target] = product.to(out_X_O.dtype)


def add_weighted(y_R_E: Tensor, weight_T_C: Tensor, x_T_E: Tensor) -> None:
    y_T_C_E = y_R_E.view(*weight_T_C.shape, -1).float()
    x_T_E.copy_(x_T_E.float() + (y_T_C_E * weight_T_C[..., None]).sum(1))


_quantizing = Quantizing(rms_norm, gated)
KERNELS = Kernels(
    *(embed, rms_norm, gated, rotate_and_store, attend, sample, verify),
    *(quantize, _quantizing.rms_norm, _quantizing.gated, fp8_product),
    *(choose, store_routes, sort, expert_product, add_weighted, mover, merger),
)
