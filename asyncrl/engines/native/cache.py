"""Keys and values of the running rows, and attention over them.

Axis suffixes: T flat tokens of a step, N rows, P rows with prefill chunks, M longest chunk, L cached length,
H query heads, K key/value heads, G query heads per key/value head, D head dimension.

The flat tokens of a step are first the last token of every row, in row order, then the other tokens of prefill
chunks. Rows are compact, so the first part attends over a plain view of the cache; only the few rows with chunks are
gathered.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.engines.native.sampling import Column
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Attend

_FIRST_ROWS, _FIRST_LENGTH = 8, 64


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a row, computed in one step beside the row's last token of that step."""

    row: int
    start: int
    end: int


class KvCache:
    """Grows by doubling in rows and length, up to the limits."""

    def __init__(self, cfg: ModelConfig, max_rows: int, max_length: int, dtype: torch.dtype) -> None:
        self._max_rows, self._max_length = max_rows, max_length
        rows, length = min(_FIRST_ROWS, max_rows), min(_FIRST_LENGTH, max_length)
        self._hold(torch.zeros(2 * cfg.layers, rows, length, cfg.kv_heads, cfg.head_dim, dtype=dtype))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length held now."""
        return self._data.shape[1], self._data.shape[2]

    def reserve(self, rows: int, length: int) -> None:
        held_rows, held_length = self.shape
        if rows <= held_rows and length <= held_length:
            return
        wide = min(self._max_rows, _doubled(held_rows, rows))
        long = min(self._max_length, _doubled(held_length, length))
        layers, _, _, heads, dim = self._data.shape
        grown = self._data.new_zeros(layers, wide, long, heads, dim)
        grown[:, :held_rows, :held_length] = self._data
        self._hold(grown)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a row the first `length` positions of another."""
        self._bytes[:, target, :length] = self._bytes[:, source, :length]

    def attend(self, positions_T: Column, rows: int, reach: int, chunks: list[Chunk]) -> Attend:
        """Attention of one step; it stores the keys and values of the step's tokens before it reads."""
        begin_T = self._row_begin[:rows]
        if chunks:
            begin_T = np.concatenate([begin_T, *(np.full(c.end - c.start, self._row_begin[c.row]) for c in chunks)])
        place_T = torch.from_numpy(begin_T + positions_T)
        mask_N_1_1_L = self._mask(positions_T[:rows], reach)[:, None, None]
        last_layer = len(self._flat) // 2 - 1
        live = self._by_head[:, :rows, :, :reach].unbind()
        chunk_part = _ChunkPart(chunks, self._mask) if chunks else None

        def attend(layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
            keys, values = 2 * layer, 2 * layer + 1
            self._flat[keys].index_copy_(0, place_T, k_T_K_D)
            self._flat[values].index_copy_(0, place_T, v_T_K_D)
            # Heads that share a key are as good as queries that share it, and attention is faster with fewer heads.
            q_N_K_G_D = q_T_H_D[:rows].reshape(rows, k_T_K_D.shape[1], -1, q_T_H_D.shape[2])
            out_N_X = _attention(q_N_K_G_D, live[keys], live[values], mask_N_1_1_L).flatten(1)
            if chunk_part is None or layer == last_layer:  # behind the last layer only a row's last token is wanted
                return out_N_X
            return torch.cat([out_N_X, chunk_part.attend(q_T_H_D[rows:], self._data[keys], self._data[values])])

        return attend

    def _hold(self, data: Tensor) -> None:
        """Keep the storage (key and value of layer 0, of layer 1, ...) and the views that every step needs."""
        self._data = data
        self._bytes = data.view(torch.uint8).numpy()  # numpy starts to copy in a tenth of the time that torch takes
        self._flat = data.flatten(1, 2).unbind()
        self._by_head = data.transpose(2, 3)
        rows, length = self.shape
        self._row_begin = np.arange(rows) * length
        shown_then_hidden = np.repeat(np.array([0, -np.inf], np.float32), length)
        self._masks = np.lib.stride_tricks.sliding_window_view(shown_then_hidden, length)[-2::-1]

    def _mask(self, positions: Column, reach: int) -> Tensor:
        """Added to scores: -inf for keys behind the query's own position; the keys are a new last axis."""
        return torch.from_numpy(self._masks[positions, :reach])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class _ChunkPart:
    """Attention of prefill chunks: one padded row of queries per chunk."""

    def __init__(self, chunks: list[Chunk], mask: Callable[[Column, int], Tensor]) -> None:
        count, width = len(chunks), max(c.end - c.start for c in chunks)
        positions_P_M = np.zeros((count, width), np.int64)  # padding looks at position 0 and is thrown away
        for index, chunk in enumerate(chunks):
            positions_P_M[index, : chunk.end - chunk.start] = np.arange(chunk.start, chunk.end)
        spans = [np.arange(i * width, i * width + c.end - c.start) for i, c in enumerate(chunks)]
        self._place = torch.from_numpy(np.concatenate(spans))
        self._shape = count, width
        self._reach = max(c.end for c in chunks)
        self._rows = torch.tensor([c.row for c in chunks])
        self._mask_P_1_M_L = mask(positions_P_M, self._reach)[:, None]

    def attend(self, q_T_H_D: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, width = self._shape
        q_P_M_H_D = q_T_H_D.new_zeros(count * width, *q_T_H_D.shape[1:]).index_copy_(0, self._place, q_T_H_D)
        out_P_H_M_D = _attention(
            q_P_M_H_D.view(count, width, *q_T_H_D.shape[1:]).transpose(1, 2),
            keys[:, : self._reach].index_select(0, self._rows).transpose(1, 2),
            values[:, : self._reach].index_select(0, self._rows).transpose(1, 2),
            self._mask_P_1_M_L,
        )
        return out_P_H_M_D.transpose(1, 2).reshape(count * width, -1).index_select(0, self._place)


def _doubled(held: int, needed: int) -> int:
    while held < needed:
        held *= 2
    return held
