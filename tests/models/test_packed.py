"""Attention over rows that share tokens: without padding, the same as with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from asyncrl.models.packed import Indices, row_attention, span_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def plain_kernel(
    q_T_H_D: Tensor, k_P_K_D: Tensor, v_P_K_D: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int
) -> Tensor:
    """Row by row, with the mask written out."""
    assert most_queries == int(queries.diff().max())
    assert most_keys == int(keys.diff().max())
    outs: list[Tensor] = []
    q_parts = q_T_H_D.split(queries.diff().tolist())
    for q, k, v in zip(q_parts, *(x.split(keys.diff().tolist()) for x in (k_P_K_D, v_P_K_D)), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q_H, k_H, v_H = (x.transpose(0, 1) for x in (q, k, v))
        outs.append(F.scaled_dot_product_attention(q_H, k_H, v_H, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def shared_rows(groups: list[tuple[int, list[int]]]) -> list[Indices]:
    """(prompt length, answer lengths) of each group, as the packer lays them out."""
    rows: list[Indices] = []
    end = 0
    for prompt, answers in groups:
        shared = np.arange(end, end + prompt)
        end += prompt
        for answer in answers:
            rows.append(np.concatenate([shared, np.arange(end, end + answer)]))
            end += answer
    return rows


groups = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1)


@settings(max_examples=30, deadline=None)
@given(groups.map(lambda drawn: drawn[:4]))
def test_spans_give_the_outputs_and_gradients_of_padded_rows(drawn: list[tuple[int, list[int]]]) -> None:
    rows = shared_rows(drawn)
    tokens = 1 + max(int(row.max()) for row in rows)
    generator = torch.Generator().manual_seed(tokens)
    inputs = [
        torch.randn(tokens, heads, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    weight = torch.randn(tokens, HEADS * DIM, generator=generator, dtype=torch.float64)
    spans, padded = (attend(0, *inputs) for attend in (span_attention(rows, "cpu", plain_kernel), row_attention(rows)))
    torch.testing.assert_close(spans, padded)
    found, expected = (torch.autograd.grad((out * weight).sum(), inputs) for out in (spans, padded))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_row_whose_own_tokens_are_not_its_last_is_refused() -> None:
    with pytest.raises(AssertionError, match="must be its last"):
        span_attention([np.array([0, 1, 2]), np.array([3, 0, 4])], "cpu", plain_kernel)
