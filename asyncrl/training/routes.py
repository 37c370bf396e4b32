"""Routes of an engine, replayed in the trainer's forward and backward (asyncrl.models.routes)."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ReplayedRoutes:
    """A `Route` of one forward, and of the backward that computes layers again: it knows them by their numbers."""

    def __init__(self, routes_T_L_C: Tensor, layers: Sequence[int]) -> None:
        self._routes_T_L_C = routes_T_L_C
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._differing: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        chosen_T_C = self._routes_T_L_C[:, self._place[layer]].long()
        if layer not in self._differing:  # else it is computed again
            with torch.no_grad():
                own_T_C = scores_T_X.topk(chosen_T_C.shape[1], dim=-1).indices
                self._differing[layer] = (own_T_C.sort(1).values != chosen_T_C.sort(1).values).any(1)
        return chosen_T_C

    @property
    def differing(self) -> Tensor:
        """T: in what share of the layers the scores would have sent each token to other experts."""
        return torch.stack(list(self._differing.values())).float().mean(0)
