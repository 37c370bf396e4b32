"""What a step is told: all of it in one block of memory, so that one copy brings it to the device.

The block on the device stays where it is, as captured graphs read it there. On the host there are two, because the
host fills in one step while the device may still be reading the last. The page table lies at the end: only the rows in
use are copied.

Axis suffixes: N rows, W columns of a row, X rows times the columns of this step, P pages of a row, J tiles of prefill
chunks, S tokens of a tile.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

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
    """A row's token and the drafted ones behind it."""
    pages: int
    """Of one row."""
    tiles: int
    tile: int
    """Tokens of a tile."""


class Fields(NamedTuple):
    """The block by its parts: arrays on the host, tensors on the device."""

    token_X: Any
    """-1-i: the i-th of what the step before has left on the device."""
    start_N: Any
    count_N: Any
    temperature_N: Any
    plain_X: Any
    """Random numbers, as are the next three but one."""
    accept_X: Any
    residual_X: Any
    draft_N_C: Any
    """For tokens drafted next, from the one behind the first column's on."""
    drafted_N: Any
    """Drafted tokens to be verified."""
    room_N: Any
    """Positions that the row may fill."""
    kept_X: Any
    """Where a drafter's training keeps the states of these tokens; 0: nowhere."""
    tile_token_J_S: Any
    tile_next_J_S: Any
    """The tokens behind those."""
    tile_row_J: Any
    tile_start_J: Any
    tile_count_J: Any
    table_N_P: Any


FLOATS = {"temperature_N", "plain_X", "accept_X", "residual_X", "draft_N_C"}


class Shape(NamedTuple):
    """What decides which graph serves a step: padded numbers of rows and tiles, and columns of a row."""

    rows: int
    width: int = 1
    tiles: int = 0
    follow: bool = False
    """A drafting head goes over the rows at once, to draft for them."""


class Block:
    """Arrays of 32-bit numbers side by side, in one piece of memory."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], floats: Sequence[bool], timeline: Timeline) -> None:
        ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
        self.begins = [0, *ends[:-1]]
        self._staged = [timeline.pinned(ends[-1]) for _ in range(2)]
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=timeline.device)
        self._turn = 0
        parts = list(zip(shapes, self.begins, ends, floats, strict=True))
        self._turns = [
            [staged.numpy()[a:b].view("f4" if real else "i4").reshape(shape) for shape, a, b, real in parts]
            for staged in self._staged
        ]
        self.device = [
            self._device[a:b].view(torch.float32 if real else torch.int32).view(shape) for shape, a, b, real in parts
        ]

    def next(self) -> list[Column]:
        """To be filled in and sent; what was sent the time before the last must have been used."""
        self._turn = 1 - self._turn
        return self._turns[self._turn]

    def send(self, end: int) -> None:
        self._device[:end].copy_(self._staged[self._turn][:end], non_blocking=True)


class StepInputs:
    def __init__(self, sizes: Sizes, timeline: Timeline) -> None:
        rows, width, pages, tiles, tile = sizes
        shapes = Fields(
            *((rows * width,), (rows,), (rows,), (rows,)),
            *((rows * width,), (rows * width,), (rows * width,), (rows, 2 * (width - 1))),
            *((rows,), (rows,), (rows * width,)),
            *((tiles, tile), (tiles, tile), (tiles,), (tiles,), (tiles,)),
            (rows, pages),
        )
        self._sizes, self._block = sizes, Block(shapes, [name in FLOATS for name in Fields._fields], timeline)
        self.device = Fields(*self._block.device)
        self._identity_N = torch.arange(rows, dtype=torch.int32, device=timeline.device)

    def next(self) -> Fields:
        """To be filled in for the next step; the step before the last must have ended."""
        return Fields(*self._block.next())

    def send(self, rows: int) -> None:
        self._block.send(self._block.begins[-1] + rows * self._sizes.pages)

    def tokens(self, shape: Shape) -> list[Tensor]:
        """Of the rows, and of the tiles; of none where there are none."""
        rows, tiles = shape.rows * shape.width, shape.tiles
        parts = self.device.token_X[:rows], self.device.tile_token_J_S[:tiles].view(-1)
        return [part for part in parts if len(part)]

    def queries(self, shape: Shape) -> list[Queries]:
        """The same."""
        rows = self.rows(shape.rows, shape.width, self.device.start_N, self.device.count_N)
        return [*([rows] if shape.rows else []), *self.tiles(shape)]

    def rows(self, rows: int, width: int, start_N: Tensor, count_N: Tensor) -> Queries:
        return Queries(width, self._identity_N[:rows], start_N[:rows], count_N[:rows], self.device.table_N_P)

    def tiles(self, shape: Shape) -> list[Queries]:
        device, tiles = self.device, shape.tiles
        if not tiles:
            return []
        row_J, start_J, count_J = (
            part[:tiles] for part in (device.tile_row_J, device.tile_start_J, device.tile_count_J)
        )
        return [Queries(self._sizes.tile, row_J, start_J, count_J, device.table_N_P)]
