"""Routes out of the steps of the native engine on a CPU (asyncrl.models.routes)."""

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.cpu.scheduler import Step
from asyncrl.engines.native.sampling import Column
from asyncrl.models.routes import Routes, RouteShape


class HostRoutes:
    """In one table, as rows of tokens are."""

    def __init__(self, shape: RouteShape, rows: int, length: int) -> None:
        # Zeroed pages cost no memory before they are touched.
        self.table: Routes = np.zeros((rows, length, len(shape.layers), shape.active), shape.dtype)

    def place(self, row: int) -> None:
        """What is there is overwritten before it is read."""

    def move(self, last: int, row: int, length: int) -> None:
        self.table[row, :length] = self.table[last, :length]

    def share(self, source: int, target: int, length: int) -> None:
        self.table[target, :length] = self.table[source, :length]

    def read(self, row: int, begin: int, end: int) -> bytes:
        return self.table[row, begin:end].tobytes()


class RouteRecorder:
    """A `Route` that chooses by the scores, as experts do without one, and records the choice of one step. Every layer
    must compute all tokens of the step, the last one too."""

    def __init__(self, routes: HostRoutes) -> None:
        self._table = routes.table
        self._chosen: list[Tensor] = []

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        chosen_T_C = scores_T_X.topk(self._table.shape[-1], dim=-1).indices
        self._chosen.append(chosen_T_C)
        return chosen_T_C

    def keep(self, step: Step, path_N_W: Column | None = None) -> None:
        """Put the routes where the tokens are, before anything moves a row. `path_N_W`: the columns that rows keep,
        where not in order. Behind them lies garbage, which is overwritten before it is seen, as in the cache."""
        routes_T_L_C = torch.stack(self._chosen, 1).numpy()
        rows, width = step.layout.rows, step.layout.width
        column_N_W = np.arange(width)[None] if path_N_W is None else path_N_W
        from_N_W = np.arange(rows)[:, None] * width + column_N_W
        self._table[np.arange(rows)[:, None], step.end_N[:, None] - 1 + np.arange(width)] = routes_T_L_C[from_N_W]
        end = rows * width
        for chunk in step.layout.chunks:
            begin, end = end, end + chunk.end - chunk.start
            self._table[chunk.row, chunk.start : chunk.end] = routes_T_L_C[begin:end]
