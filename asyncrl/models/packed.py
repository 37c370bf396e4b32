"""Causal attention over packed samples: each sample becomes a row of its own, so none can see another.

Axis suffixes: T flat tokens, P padded tokens, N rows, L row length, H query heads, K key/value heads, D head dimension.

Samples may share tokens: the answers of one group share their prompt, which then is computed once for all of them.
Only attention sees it once per row, and the gradients of the copies add up. Rows are gathered into buckets of similar
length, because answer lengths are long-tailed and one padded batch would spend most of its work on padding. Padding
lies behind the tokens, so the causal mask alone hides it.

On a GPU in bf16 nothing is padded and no query is computed twice: flash attention takes rows of any lengths, and the
queries of a row are only its tokens that no row before had, the last ones. `span_attention` prepares that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.models.layers import Attend, Indices

SHORTEST_BUCKET = 8
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""(q_T_H_D, k_P_K_D, v_P_K_D, where each row's queries begin, where its keys begin, most queries, most keys) ->
out_T_H_D. Both starts are int32 and end with the total; a row's last query sees all of its keys."""


def packed_attention(lengths: Sequence[int], device: torch.device | str = "cpu", *, narrow: bool = False) -> Attend:
    """Attention for flat tokens that are samples of these lengths, one behind the other."""
    rows = [np.arange(end - length, end) for end, length in zip(np.cumsum(lengths), lengths, strict=True)]
    return attention_for(rows, torch.device(device), narrow=narrow)


def row_attention(rows: Sequence[Indices], device: torch.device | str = "cpu") -> Attend:
    """Attention for samples that consist of these flat tokens, in order; every flat token is in some row."""
    source_P, buckets = _layout(rows)
    place_T = np.empty(source_P.max() + 1, dtype=np.int64)
    place_T[source_P[::-1]] = np.arange(len(source_P))[::-1]  # a token's first place, which is never padding
    source, place = torch.from_numpy(source_P).to(device), torch.from_numpy(place_T).to(device)
    sizes = [count * length for count, length in buckets]

    def attend(_layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        heads, dim = (q_T_H_D.shape[1], k_T_K_D.shape[1], v_T_K_D.shape[1]), q_T_H_D.shape[2]
        # As an embedding, whose backward adds up the copies much faster than that of indexing.
        padded_P = F.embedding(source, torch.cat((q_T_H_D, k_T_K_D, v_T_K_D), dim=1).flatten(1))
        outs = [
            _causal(part.view(count, length, sum(heads), dim).transpose(1, 2), heads)
            for (count, length), part in zip(buckets, padded_P.split(sizes), strict=True)
        ]
        return _Unpad.apply(torch.cat(outs), place)

    return attend


def attention_for(rows: Sequence[Indices], device: torch.device, *, narrow: bool) -> Attend:
    """The fastest that there is: flash attention on a GPU in bf16, else padded buckets."""
    return span_attention(rows, device, flash) if uses_flash(device, narrow) else row_attention(rows, device)


def uses_flash(device: torch.device, narrow: bool) -> bool:
    return narrow and device.type == "cuda"


def span_attention(rows: Sequence[Indices], device: torch.device | str, kernel: Kernel) -> Attend:
    """As `row_attention`, without padding. Tokens must be numbered in the order in which the rows first have them."""
    seen, spans = 0, [(0, 0)]
    parts: list[Indices] = []
    for row in rows:
        new = int(row[-1]) + 1 - seen
        if new > 0:  # else the row is the beginning of an earlier one
            assert np.array_equal(row[-new:], np.arange(seen, seen + new)), "a row's own tokens must be its last"
            seen += new
            parts.append(row)
            spans.append((new, len(row)))
    most_queries, most_keys = (int(most) for most in np.max(spans, axis=0))
    # The driver copies so little at once; else the host would wait for the card, which another process may have.
    starts_2_N = torch.from_numpy(np.cumsum(spans, axis=0, dtype=np.int32).T.copy()).to(device, non_blocking=True)
    source_P = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)

    def attend(_layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        k_P_K_D, v_P_K_D = (
            F.embedding(source_P, x_T_K_D.flatten(1)).view(-1, *x_T_K_D.shape[1:]) for x_T_K_D in (k_T_K_D, v_T_K_D)
        )
        return kernel(q_T_H_D, k_P_K_D, v_P_K_D, starts_2_N[0], starts_2_N[1], most_queries, most_keys).flatten(1)

    return attend


def flash(
    q_T_H_D: Tensor,
    k_P_K_D: Tensor,
    v_P_K_D: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
) -> Tensor:
    """The operator below `torch.nn.attention.varlen`, whose own arguments change from version to version."""
    q_T_H_D, k_P_K_D, v_P_K_D = (x.bfloat16() for x in (q_T_H_D, k_P_K_D, v_P_K_D))
    return torch.ops.aten._flash_attention_forward(
        q_T_H_D, k_P_K_D, v_P_K_D, query_starts, key_starts, most_queries, most_keys, 0.0, True, False
    )[0]


def _layout(rows: Sequence[Indices]) -> tuple[Indices, list[tuple[int, int]]]:
    """The flat token at each padded place, and (rows, length) of each bucket; padding repeats a row's last token."""
    lengths_N = np.array([len(row) for row in rows])
    bucket_N = np.ceil(np.log2(np.maximum(lengths_N, SHORTEST_BUCKET)))
    parts: list[Indices] = []
    buckets: list[tuple[int, int]] = []
    for bucket in np.unique(bucket_N):
        members: list[int] = np.flatnonzero(bucket_N == bucket).tolist()
        length = int(lengths_N[members].max())
        parts += [np.pad(rows[member], (0, length - len(rows[member])), mode="edge") for member in members]
        buckets.append((len(members), length))
    return np.concatenate(parts), buckets


def _causal(qkv_N_A_L_D: Tensor, heads: tuple[int, int, int]) -> Tensor:
    q_N_H_L_D, k_N_K_L_D, v_N_K_L_D = qkv_N_A_L_D.split(heads, dim=1)
    gqa = heads[0] != heads[1]
    out = F.scaled_dot_product_attention(q_N_H_L_D, k_N_K_L_D, v_N_K_L_D, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class _Unpad(torch.autograd.Function):
    """Select the real tokens. Its backward is a copy: index_select's own would add row by row, many times slower."""

    @staticmethod
    def forward(ctx: Any, x_P_X: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.padded = x_P_X.shape[0]
        return x_P_X.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        (grad_T_X,) = grads
        return grad_T_X.new_zeros(ctx.padded, grad_T_X.shape[1]).index_copy_(0, place_T, grad_T_X), None
