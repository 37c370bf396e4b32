"""Routes on a GPU (asyncrl.models.routes): in pages beside the keys and values, written by the steps themselves.

So they are shared, copied and overwritten as those are, and rows that move take nothing along. The host reads them when
a segment is taken, beside the running step, which writes behind what is read.
"""

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.cuda.pages import PAGE, PageTable, pages_of
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.models.routes import Routes, RouteShape


def new_route_pages(shape: RouteShape, pages: int, device: torch.device) -> Tensor:
    dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16  # the same bits: torch knows little of uint16
    return torch.zeros(pages, PAGE, len(shape.layers), shape.active, dtype=dtype, device=device)


class RoutePages:
    def __init__(self, pages_X_S_L_C: Tensor, rows: PageTable, timeline: Timeline) -> None:
        self._pages_X_S_L_C, self._rows, self._timeline = pages_X_S_L_C, rows, timeline
        self._saved: dict[int, tuple[int, Routes]] = {}
        """Of rows that gave up their pages: the first position, and routes from there on."""

    def place(self, row: int) -> None:
        self._saved.pop(row, None)

    def move(self, last: int, row: int, length: int) -> None:
        self.place(row)
        if last in self._saved:
            self._saved[row] = self._saved.pop(last)

    def share(self, source: int, target: int, length: int) -> None:
        """Pages are shared or copied already."""

    def save(self, row: int, begin: int, end: int) -> None:
        """Those from `begin` to `end` will be read, though the row gives up its pages and is computed again."""
        self._timeline.wait()  # the last ones may be of the running step
        self._saved[row] = begin, self._array(row, begin, end)

    def read(self, row: int, begin: int, end: int) -> bytes:
        return self._array(row, begin, end).tobytes()

    def _array(self, row: int, begin: int, end: int) -> Routes:
        if row not in self._saved:
            return self._read_pages(row, begin, end)
        first, saved = self._saved[row]
        kept = saved[begin - first : end - first]
        return np.concatenate([kept, self._read_pages(row, begin + len(kept), end)])

    def _read_pages(self, row: int, begin: int, end: int) -> Routes:
        first, last = begin // PAGE, pages_of(end)
        places = torch.from_numpy(self._rows.table[row, first:last].astype(np.int64))
        with self._timeline.beside():
            found_T_L_C = self._pages_X_S_L_C[places.to(self._pages_X_S_L_C.device)].flatten(0, 1).cpu().numpy()
        return found_T_L_C[begin - first * PAGE : end - first * PAGE]
