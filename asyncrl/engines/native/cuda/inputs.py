"""What a step is told: all of it in one block of memory, so that one copy brings it to the device.

The block on the device stays where it is, as captured graphs read it there. On the host there are two, because the
host fills in one step while the device may still be reading the last. The page table lies at the end: only the rows in
use are copied.

Axis suffixes: N rows, W columns of a row, P pages of a row, J tiles of prefill chunks, S tokens of a tile.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Queries
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.sampling import Column


class Sizes(NamedTuple):
    """The largest step."""

    rows: int
    width: int
    pages: int
    """Of one row."""
    tiles: int
    tile: int
    """Tokens of a tile."""


class Fields(NamedTuple):
    """The block by its parts, on the host."""

    token_N_W: Column
    """-1-i: what row i of the step before has sampled."""
    start_N: Column
    count_N: Column
    temperature_N: Column
    uniform_N_W: Column
    tile_token_J_S: Column
    tile_row_J: Column
    tile_start_J: Column
    tile_count_J: Column
    table_N_P: Column


class Shape(NamedTuple):
    """What decides which graph serves a step: padded numbers of rows and tiles, and columns of a row."""

    rows: int
    width: int = 1
    tiles: int = 0


class StepInputs:
    def __init__(self, sizes: Sizes, timeline: Timeline) -> None:
        rows, width, pages, tiles, tile = sizes
        self._sizes = sizes
        shapes = [(rows, width), (rows,), (rows,), (rows,), (rows, width), (tiles, tile), (tiles,), (tiles,), (tiles,)]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes]).tolist()
        self._begins, self._shapes = [0, *ends], [*shapes, (rows, pages)]
        self._table = ends[-1]
        total = self._table + rows * pages
        self._staged = [timeline.pinned(total) for _ in range(2)]
        self._turns = [self._fields(staged.numpy()) for staged in self._staged]
        self._device = torch.zeros(total, dtype=torch.int32, device=timeline.device)
        self._identity_N = torch.arange(rows, dtype=torch.int32, device=timeline.device)
        self._turn = 0

    def next(self) -> Fields:
        """To be filled in for the next step; the step before the last must have ended."""
        self._turn = 1 - self._turn
        return self._turns[self._turn]

    def send(self, rows: int) -> None:
        end = self._table + rows * self._sizes.pages
        self._device[:end].copy_(self._staged[self._turn][:end], non_blocking=True)

    def tokens(self, shape: Shape) -> list[Tensor]:
        """Of the rows, and of the tiles."""
        rows = self._part(0).view(-1)[: shape.rows * shape.width]
        return [rows, self._part(5)[: shape.tiles].view(-1)] if shape.tiles else [rows]

    def queries(self, shape: Shape) -> list[Queries]:
        """The same."""
        table, rows, tiles = self._part(9), shape.rows, shape.tiles
        found = [Queries(shape.width, self._identity_N[:rows], self._part(1)[:rows], self._part(2)[:rows], table)]
        if tiles:
            row_J, start_J, count_J = (self._part(part)[:tiles] for part in (6, 7, 8))
            found.append(Queries(self._sizes.tile, row_J, start_J, count_J, table))
        return found

    def temperature(self, shape: Shape) -> Tensor:
        return self._part(3)[: shape.rows].view(torch.float32)

    def uniform(self, shape: Shape) -> Tensor:
        return self._part(4).view(-1)[: shape.rows * shape.width].view(torch.float32)

    def _part(self, part: int) -> Tensor:
        shape, begin = self._shapes[part], self._begins[part]
        return self._device[begin : begin + int(np.prod(shape))].view(shape)

    def _fields(self, block: Column) -> Fields:
        parts = [
            block[begin : begin + int(np.prod(shape))].reshape(shape)
            for begin, shape in zip(self._begins, self._shapes, strict=True)
        ]
        parts[3], parts[4] = parts[3].view(np.float32), parts[4].view(np.float32)
        return Fields(*parts)
