"""Routes in the trainer's forward: replayed from an engine (asyncrl.models.routes) or its own, and their loads."""

import torch
from torch import Tensor

from asyncrl.models.experts import Routing
from asyncrl.models.routes import RouteShape


class ObservedRoutes:
    """A `Route` of one forward, and of the backward that computes layers again: it knows them by their numbers.

    Nothing here waits for the device, and no scores are kept, only their sums.
    """

    def __init__(self, shape: RouteShape, replayed_T_L_C: Tensor | None = None, *, balanced: bool = False) -> None:
        """The scores choose where nothing is replayed; `balanced`: with what a load-balancing loss needs."""
        self._shape, self._replayed_T_L_C, self._balanced = shape, replayed_T_L_C, balanced
        self._place = {layer: place for place, layer in enumerate(shape.layers)}
        self._load: dict[int, Tensor] = {}
        self._scores: dict[int, Tensor] = {}
        self._differing: dict[int, Tensor] = {}
        self._tokens = 0

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        if self._replayed_T_L_C is None:
            chosen_T_C = scores_T_X.topk(self._shape.active, dim=-1).indices
        else:
            chosen_T_C = self._replayed_T_L_C[:, self._place[layer]].long()
        if layer not in self._load:  # else it is computed again
            self._observe(layer, scores_T_X, chosen_T_C)
        return chosen_T_C

    def _observe(self, layer: int, scores_T_X: Tensor, chosen_T_C: Tensor) -> None:
        self._tokens = len(scores_T_X)
        if self._balanced:
            self._scores[layer] = scores_T_X.sum(0)
        with torch.no_grad():
            chosen = chosen_T_C.flatten()
            self._load[layer] = chosen.new_zeros(self._shape.experts).scatter_add_(0, chosen, torch.ones_like(chosen))
            if self._replayed_T_L_C is not None:
                own_T_C = scores_T_X.topk(self._shape.active, dim=-1).indices
                self._differing[layer] = (own_T_C.sort(1).values != chosen_T_C.sort(1).values).any(1)

    @property
    def found(self) -> Routing:
        """After the forward."""
        return Routing(
            load_L_X=torch.stack(list(self._load.values())),
            scores_L_X=torch.stack(list(self._scores.values())) if self._balanced else None,
            tokens=self._tokens,
            rerouted_T=torch.stack(list(self._differing.values())).float().mean(0) if self._differing else None,
        )
