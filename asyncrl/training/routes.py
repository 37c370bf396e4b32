"""Routes in the trainer's forward: replayed from an engine (asyncrl.models.routes) or its own, and their loads."""

import torch
from torch import Tensor

from asyncrl.models.experts import Routing
from asyncrl.models.routes import RouteShape
from asyncrl.training.distributed.context import Part


class ObservedRoutes:
    """A `Route` of one forward, and of the backward that computes layers again: it knows them by their numbers.

    Nothing here waits for the device, and of the scores only sums are kept.
    """

    def __init__(self, shape: RouteShape, here: Part, *, balanced: bool = False) -> None:
        """Of this rank's part of a batch; figures are about the tokens that samples were predicted from. The scores
        choose where nothing is replayed. `balanced`: with the load-balancing loss."""
        self._shape, self._here, self._balanced = shape, here, balanced
        self._predict_L, self._replayed_T_L_C = here.predict_L, here.routes_T_L_C
        self._place = {layer: place for place, layer in enumerate(shape.layers)}
        self._chosen: dict[int, Tensor] = {}
        self._load: dict[int, Tensor] = {}
        self._differing: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}
        self._scores: dict[int, Tensor] = {}

    def __call__(self, layer: int, scores_T_X: Tensor) -> Tensor:
        if layer in self._chosen:  # it is computed again, and scores that were equal may be so no more
            return self._chosen[layer].long()
        if self._replayed_T_L_C is None:
            chosen_T_C = scores_T_X.detach().topk(self._shape.active, dim=-1).indices
            self._chosen[layer] = chosen_T_C.to(torch.int16)
        else:
            self._chosen[layer] = self._replayed_T_L_C[:, self._place[layer]]
            chosen_T_C = self._chosen[layer].long()
        self._observe(layer, scores_T_X, chosen_T_C)
        return chosen_T_C

    def _observe(self, layer: int, scores_T_X: Tensor, chosen_T_C: Tensor) -> None:
        chosen_L_C = chosen_T_C[self._predict_L]
        self._load[layer] = self._count(chosen_L_C)
        if self._replayed_T_L_C is not None:
            own_L_C = scores_T_X.detach()[self._predict_L].topk(self._shape.active, dim=-1).indices
            self._differing[layer] = (own_L_C.sort(1).values != chosen_L_C.sort(1).values).any(1)
        if self._balanced:
            self._shares[layer] = self._count(chosen_T_C) / self._here.total_tokens
            self._scores[layer] = scores_T_X.sum(0) / self._here.total_tokens

    def _count(self, chosen: Tensor) -> Tensor:
        """X: how often each was chosen. `bincount` would wait for the device."""
        chosen = chosen.flatten()
        return chosen.new_zeros(self._shape.experts).scatter_add_(0, chosen, torch.ones_like(chosen))

    @property
    def found(self) -> Routing:
        """After the forward: loads and balance of the whole batch, the rest of the tokens here."""
        return Routing(
            load_N_X=self._here.total(torch.stack(list(self._load.values()))),
            rerouted_L=torch.stack(list(self._differing.values())).float().mean(0) if self._differing else None,
            balance_loss=self._balance_loss() if self._balanced else None,
        )

    def _balance_loss(self) -> Tensor:
        """As transformers has it for the Switch Transformer: the share of the tokens that each expert gets times its
        mean score, both over all layers. It is the number of active experts where all are equally busy."""
        both = (self._here.total(torch.stack(list(each.values()))) for each in (self._shares, self._scores))
        share_X, score_X = (each_N_X.mean(0) for each_N_X in both)
        return self._shape.experts * (share_X * score_X).sum()
