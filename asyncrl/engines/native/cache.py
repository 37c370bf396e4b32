"""Keys and values of the running rows, and attention over them.

Axis suffixes: T flat tokens of a step, N rows, P rows with prefill chunks, M longest chunk, L cached length,
H query heads, K key/value heads, D head dimension.

The flat tokens of a step are first the last token of every row, in row order, then the other tokens of prefill
chunks. Rows are compact, so the first part attends over a plain view of the cache; only the few rows with chunks are
gathered.
"""

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
        self._kv_heads = cfg.kv_heads
        shape = (cfg.layers, 2, min(_FIRST_ROWS, max_rows), cfg.kv_heads, min(_FIRST_LENGTH, max_length), cfg.head_dim)
        self._data = torch.zeros(shape, dtype=dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length held now."""
        return self._data.shape[2], self._data.shape[4]

    def reserve(self, rows: int, length: int) -> None:
        held_rows, held_length = self.shape
        if rows <= held_rows and length <= held_length:
            return
        wide = min(self._max_rows, _doubled(held_rows, rows))
        long = min(self._max_length, _doubled(held_length, length))
        layers, pair, _, heads, _, dim = self._data.shape
        grown = self._data.new_zeros(layers, pair, wide, heads, long, dim)
        grown[:, :, :held_rows, :, :held_length] = self._data
        self._data = grown

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a row the first `length` positions of another."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def attend(self, positions_T: Column, rows: int, chunks: list[Chunk]) -> Attend:
        """Attention of one step; it stores the keys and values of the step's tokens before it reads."""
        row_T = np.concatenate([np.arange(rows), *(np.full(c.end - c.start, c.row) for c in chunks)])
        place = self._places(row_T, positions_T)
        reach = int(positions_T[:rows].max()) + 1
        mask_N_1_1_L = _mask(positions_T[:rows, None], reach).unsqueeze(1)
        chunk_part = _ChunkPart(chunks) if chunks else None

        def attend(layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
            keys, values = self._data[layer].unbind()
            dim = q_T_H_D.shape[-1]
            keys.view(-1, dim).index_copy_(0, place, k_T_K_D.reshape(-1, dim))
            values.view(-1, dim).index_copy_(0, place, v_T_K_D.reshape(-1, dim))
            out_N_H_D = F.scaled_dot_product_attention(
                q_T_H_D[:rows].unsqueeze(2),
                keys[:rows, :, :reach],
                values[:rows, :, :reach],
                attn_mask=mask_N_1_1_L,
                enable_gqa=True,
            ).squeeze(2)
            if chunk_part is None:
                return out_N_H_D
            return torch.cat([out_N_H_D, chunk_part.attend(q_T_H_D[rows:], keys, values)])

        return attend

    def _places(self, row_T: Column, positions_T: Column) -> Tensor:
        """Index of each token and key/value head in the cache of a layer, seen as a list of vectors."""
        heads, length = self._data.shape[3:5]
        first_T = row_T * (heads * length) + positions_T
        return torch.from_numpy((first_T[:, None] + np.arange(heads) * length).reshape(-1))


class _ChunkPart:
    """Attention of prefill chunks: one padded row of queries per chunk."""

    def __init__(self, chunks: list[Chunk]) -> None:
        count, width = len(chunks), max(c.end - c.start for c in chunks)
        positions_P_M = np.zeros((count, width), np.int64)  # padding looks at position 0 and is thrown away
        for index, chunk in enumerate(chunks):
            positions_P_M[index, : chunk.end - chunk.start] = np.arange(chunk.start, chunk.end)
        spans = [np.arange(i * width, i * width + c.end - c.start) for i, c in enumerate(chunks)]
        self._place = torch.from_numpy(np.concatenate(spans))
        self._shape = count, width
        self._reach = max(c.end for c in chunks)
        self._rows = torch.tensor([c.row for c in chunks])
        self._mask_P_1_M_L = _mask(positions_P_M, self._reach).unsqueeze(1)

    def attend(self, q_T_H_D: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, width = self._shape
        q_P_M_H_D = q_T_H_D.new_zeros(count * width, *q_T_H_D.shape[1:]).index_copy_(0, self._place, q_T_H_D)
        out_P_H_M_D = F.scaled_dot_product_attention(
            q_P_M_H_D.view(count, width, *q_T_H_D.shape[1:]).transpose(1, 2),
            keys[:, :, : self._reach].index_select(0, self._rows),
            values[:, :, : self._reach].index_select(0, self._rows),
            attn_mask=self._mask_P_1_M_L,
            enable_gqa=True,
        )
        return out_P_H_M_D.transpose(1, 2).reshape(count * width, *q_T_H_D.shape[1:]).index_select(0, self._place)


def _mask(positions: Column, reach: int) -> Tensor:
    """Added to scores: -inf for keys behind the query's own position; the keys are a new last axis."""
    return torch.from_numpy(np.where(np.arange(reach) <= positions[..., None], np.float32(0), np.float32(-np.inf)))


def _doubled(held: int, needed: int) -> int:
    while held < needed:
        held *= 2
    return held
