"""Keys and values of the running rows, and attention over them.

Axis suffixes: T flat tokens of a step, N rows, W columns of a row, P rows with prefill chunks, M longest chunk,
L cached length, H query heads, K key/value heads, G query heads per key/value head, D head dimension.

The flat tokens of a step are first the columns of every row, in row order, then the other tokens of prefill chunks.
There is one column, the row's last token, or more where drafts are verified behind it. Rows are compact, so the first
part attends over a plain view of the cache; only the few rows with chunks are gathered.

What lies behind the end of a row is garbage, and is overwritten before it is seen.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.engines.native.sampling import Column
from asyncrl.models.config import ModelConfig
from asyncrl.models.layers import Attend

_FIRST_ROWS, _FIRST_LENGTH = 8, 64


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a row, computed in one step beside the row's last token of that step."""

    row: int
    start: int
    end: int


class Branches(NamedTuple):
    """Columns that see each other as a tree does, in the slots behind `base`."""

    base_N: Column
    """The last slot that all columns of a row see."""
    seen_N_W_X: Column
    """Which of the next X slots each column sees."""


class Layout(NamedTuple):
    """Where the flat tokens of a pass lie in the cache."""

    slots_T: Column
    rows: int
    reach: int
    """Slots of the longest row, after the pass."""
    chunks: list[Chunk]
    width: int = 1
    """Columns of a row."""
    branches: Branches | None = None
    """None: a column sees the slots up to its own."""
    first_N: Column | None = None
    """The first slot of each row that holds anything; None: it is slot 0."""
    all_chunks: bool = False
    """Whether the results of chunks are wanted behind the last layer too."""


class KvCache:
    """Grows by doubling in rows and length, up to the limits."""

    def __init__(self, cfg: ModelConfig, max_rows: int, max_length: int, dtype: torch.dtype) -> None:
        self._max_rows, self._max_length = max_rows, max_length
        self._group = cfg.heads // cfg.kv_heads
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

    def save(self, row: int, length: int) -> npt.NDArray[np.uint8]:
        """A copy of the first `length` positions of a row."""
        return self._bytes[:, row, :length].copy()

    def restore(self, saved: npt.NDArray[np.uint8], row: int, length: int) -> None:
        """Give a row the first `length` positions of what was saved."""
        self._bytes[:, row, :length] = saved[:, :length]

    def gather(self, rows_R: Column, source_R: Column, target_R: Column) -> None:
        """Move positions of rows to others of the same rows."""
        begin_R = self._row_begin[rows_R]
        source, target = torch.from_numpy(begin_R + source_R), torch.from_numpy(begin_R + target_R)
        flat = self._data.flatten(1, 2)
        flat[:, target] = flat[:, source]

    def attend(self, layout: Layout) -> Attend:
        """Attention of one pass; it stores the keys and values of the pass's tokens before it reads."""
        rows, chunks, width = layout.rows, layout.chunks, layout.width
        begin_T = self._row_begin[:rows] if width == 1 else self._row_begin[:rows].repeat(width)
        if chunks:
            begin_T = np.concatenate([begin_T, *(np.full(c.end - c.start, self._row_begin[c.row]) for c in chunks)])
        place_T = torch.from_numpy(begin_T + layout.slots_T)
        row_part = self._one_column(layout) if width == 1 and layout.branches is None else self._columns(layout)
        last_layer = -1 if layout.all_chunks else len(self._flat) // 2 - 1
        chunk_part = _ChunkPart(layout, self._mask) if chunks else None

        def attend(layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
            keys, values = 2 * layer, 2 * layer + 1
            self._flat[keys].index_copy_(0, place_T, k_T_K_D)
            self._flat[values].index_copy_(0, place_T, v_T_K_D)
            out_T_X = row_part(keys, q_T_H_D)
            if chunk_part is None or layer == last_layer:  # behind the last layer only a row's last token is wanted
                return out_T_X
            out_Y_X = chunk_part.attend(q_T_H_D[rows * width :], self._data[keys], self._data[values])
            return torch.cat([out_T_X, out_Y_X])

        return attend

    def _one_column(self, layout: Layout) -> Callable[[int, Tensor], Tensor]:
        """Heads that share a key are as good as queries that share it, and attention is faster with fewer heads."""
        rows, kv_heads = layout.rows, self._data.shape[3]
        mask_N_1_1_L = self._mask(layout.slots_T[:rows], layout.first_N, layout.reach)[:, None, None]
        live = self._by_head[:, :rows, :, : layout.reach].unbind()

        def attend(keys: int, q_T_H_D: Tensor) -> Tensor:
            q_N_K_G_D = q_T_H_D[:rows].reshape(rows, kv_heads, -1, q_T_H_D.shape[2])
            return _attention(q_N_K_G_D, live[keys], live[keys + 1], mask_N_1_1_L).flatten(1)

        return attend

    def _columns(self, layout: Layout) -> Callable[[int, Tensor], Tensor]:
        """The same for more columns, which are further queries."""
        rows, width, kv_heads = layout.rows, layout.width, self._data.shape[3]
        group, mask_N_W_L = self._group, self._column_mask(layout)
        mask_N_1_X_L = mask_N_W_L.repeat_interleave(group, 1)[:, None]
        live = self._by_head[:, :rows, :, : layout.reach].unbind()

        def attend(keys: int, q_T_H_D: Tensor) -> Tensor:
            dim = q_T_H_D.shape[2]
            q_N_K_W_G_D = q_T_H_D[: rows * width].view(rows, width, kv_heads, group, dim).transpose(1, 2)
            out = _attention(q_N_K_W_G_D.flatten(2, 3), live[keys], live[keys + 1], mask_N_1_X_L)
            return out.view(rows, kv_heads, width, group, dim).transpose(1, 2).reshape(rows * width, -1)

        return attend

    def _column_mask(self, layout: Layout) -> Tensor:
        rows, width, branches = layout.rows, layout.width, layout.branches
        first_N_1 = None if layout.first_N is None else layout.first_N[:, None]
        if branches is None:
            return self._mask(layout.slots_T[: rows * width].reshape(rows, width), first_N_1, layout.reach)
        base_N_W = branches.base_N[:, None].repeat(width, 1)
        mask_N_W_L = self._mask(base_N_W, first_N_1, layout.reach)
        count = branches.seen_N_W_X.shape[2]
        behind_N_W_X = torch.from_numpy(base_N_W[:, :, None] + np.arange(1, 1 + count))
        hidden_N_W_X = torch.from_numpy(np.where(branches.seen_N_W_X, np.float32(0), np.float32(-np.inf)))
        return mask_N_W_L.scatter_(2, behind_N_W_X, hidden_N_W_X)

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

    def _mask(self, positions: Column, first: Column | None, reach: int) -> Tensor:
        """Added to scores: -inf for keys behind the query's own position; the keys are a new last axis."""
        mask = self._masks[positions, :reach]
        if first is not None:
            mask[np.broadcast_to(np.arange(reach) < first[..., None], mask.shape)] = -np.inf
        return torch.from_numpy(mask)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class _ChunkPart:
    """Attention of prefill chunks: one padded row of queries per chunk."""

    def __init__(self, layout: Layout, mask: Callable[[Column, Column | None, int], Tensor]) -> None:
        chunks = layout.chunks
        count, width = len(chunks), max(c.end - c.start for c in chunks)
        positions_P_M = np.empty((count, width), np.int64)
        for index, chunk in enumerate(chunks):
            positions_P_M[index] = chunk.start  # padding is thrown away, but must see something
            positions_P_M[index, : chunk.end - chunk.start] = np.arange(chunk.start, chunk.end)
        spans = [np.arange(i * width, i * width + c.end - c.start) for i, c in enumerate(chunks)]
        self._place = torch.from_numpy(np.concatenate(spans))
        self._shape = count, width
        self._reach = max(c.end for c in chunks)
        self._rows = torch.tensor([c.row for c in chunks])
        first_P_1 = None if layout.first_N is None else layout.first_N[[c.row for c in chunks], None]
        self._mask_P_1_M_L = mask(positions_P_M, first_P_1, self._reach)[:, None]

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
