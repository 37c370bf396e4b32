"""Routes out of the steps of the native engine on a CPU (asyncrl.models.routes)."""

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cpu.scheduler import Step
from asyncrl.engines.native.sampling import Column


class RouteRecorder:
    """A `Route` that chooses by the scores, as experts do without one, and records the choice of one step. Every layer
    must compute all tokens of the step, the last one too."""

    def __init__(self, active: int) -> None:
        self._active = active
        self._chosen: list[Tensor] = []

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        chosen_T_C = scores_T_X.topk(self._active, dim=-1).indices
        self._chosen.append(chosen_T_C)
        return chosen_T_C

    def keep(self, slots: BatchTable, step: Step, path_N_W: Column | None = None) -> None:
        """Put the routes where the tokens are, before anything moves a row. `path_N_W`: the columns that rows keep,
        where not in order. Behind them lies garbage, which is overwritten before it is seen, as in the cache."""
        assert slots.routes is not None
        routes_T_L_C = torch.stack(self._chosen, 1).numpy()
        rows, width = step.layout.rows, step.layout.width
        column_N_W = np.arange(width)[None] if path_N_W is None else path_N_W
        from_N_W = np.arange(rows)[:, None] * width + column_N_W
        slots.routes[np.arange(rows)[:, None], step.end_N[:, None] - 1 + np.arange(width)] = routes_T_L_C[from_N_W]
        end = rows * width
        for chunk in step.layout.chunks:
            begin, end = end, end + chunk.end - chunk.start
            slots.routes[chunk.row, chunk.start : chunk.end] = routes_T_L_C[begin:end]
