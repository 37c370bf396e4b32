"""Causal attention over packed samples: each sample becomes a row of its own, so none can see another.

Axis suffixes: T flat tokens, P padded tokens, N rows, L row length, H query heads, K key/value heads, D head dimension.

Rows are gathered into buckets of similar length, because answer lengths are long-tailed and one padded batch would
spend most of its work on padding. Padding lies behind the tokens, so the causal mask alone hides it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.models.decoder import Attend


def packed_attention(lengths: Sequence[int], device: torch.device | str = "cpu") -> Attend:
    """Attention for flat tokens that are samples of these lengths, one behind the other."""
    place_T, buckets = _layout(np.asarray(lengths, dtype=np.int64))
    place = torch.from_numpy(place_T).to(device)
    sizes = [rows * length for rows, length in buckets]

    def attend(_layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        padded = [x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, place, x) for x in (q_T_H_D, k_T_K_D, v_T_K_D)]
        outs = [
            _causal(*(x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in parts))
            for (rows, length), *parts in zip(buckets, *(x.split(sizes) for x in padded), strict=True)
        ]
        return _Unpad.apply(torch.cat(outs), place)

    return attend


def _layout(lengths_N: "np.ndarray[Any, np.dtype[np.int64]]") -> tuple["np.ndarray[Any, Any]", list[tuple[int, int]]]:
    """Where each flat token lies in the padded rows, and (rows, length) of each bucket."""
    bucket_N = np.ceil(np.log2(np.maximum(lengths_N, 8))).astype(np.int64)
    row_start_N = np.zeros_like(lengths_N)
    buckets: list[tuple[int, int]] = []
    begin = 0
    for bucket in np.unique(bucket_N):
        members = np.flatnonzero(bucket_N == bucket)
        length = int(lengths_N[members].max())
        row_start_N[members] = begin + length * np.arange(len(members))
        begin += length * len(members)
        buckets.append((len(members), length))
    flat_start_N = np.cumsum(lengths_N) - lengths_N
    return np.arange(lengths_N.sum()) + np.repeat(row_start_N - flat_start_N, lengths_N), buckets


def _causal(q_N_H_L_D: Tensor, k_N_K_L_D: Tensor, v_N_K_L_D: Tensor) -> Tensor:
    gqa = q_N_H_L_D.shape[1] != k_N_K_L_D.shape[1]
    out = F.scaled_dot_product_attention(q_N_H_L_D, k_N_K_L_D, v_N_K_L_D, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(0, 1)


class _Unpad(torch.autograd.Function):
    """Select the real tokens. Its backward is a copy: index_select's own would add row by row, many times slower."""

    @staticmethod
    def forward(ctx: Any, x_P_H_D: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.padded = x_P_H_D.shape[0]
        return x_P_H_D.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        (grad_T_H_D,) = grads
        return grad_T_H_D.new_zeros(ctx.padded, *grad_T_H_D.shape[1:]).index_copy_(0, place_T, grad_T_H_D), None
