"""A mixture of experts: a router sends each token to a few of many gated layers, and adds up what they answer.

    scores = softmax(x R)  in fp32        chosen = the `active` experts with the highest scores, or those of a `Route`
    y = sum of w_e * (silu(x G_e) * (x U_e)) D_e  over the chosen e;  w = their scores, divided by their sum if
                                                                          `renormalized`

Which experts are chosen has no gradient; the weights of the chosen ones have, and so the router learns. A `Route` is
asked instead of the scores where the choice was made before: in training, by the engine that sampled the token. It is
asked by the number of the layer, so a layer that is computed again in the backward chooses the same.

Axis suffixes as in `asyncrl.models.decoder`, and X experts, C chosen experts of a token, R rows: a token once for each
of its experts, sorted by expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Route = Callable[[int, Tensor], Tensor]
"""(layer, scores_T_X) -> chosen_T_C: the experts of each token."""
Rounding = Callable[[Tensor], Tensor]
"""What becomes of the inputs of an expert's matrices, in FP8."""


class ExpertTensors(NamedTuple):
    """Of one layer. Matrices are inputs by outputs, as in `LayerTensors`."""

    router_E_X: Tensor
    gate_up_X_E_F: Tensor
    down_X_F_E: Tensor
    active: int
    renormalized: bool

    def forward(self, x_T_E: Tensor, layer: int, route: Route | None, rounding: Rounding | None = None) -> Tensor:
        """`x_T_E` is normalised. Scores are of what is not rounded."""
        scores_T_X = self.scores(x_T_E)
        chosen_T_C = self.best(scores_T_X) if route is None else route(layer, scores_T_X)
        weight_T_C = scores_T_X.gather(1, chosen_T_C)
        if self.renormalized:
            weight_T_C = weight_T_C / weight_T_C.sum(1, keepdim=True)
        y_T_C_E = self._answers(x_T_E if rounding is None else rounding(x_T_E), chosen_T_C, rounding)
        return (y_T_C_E * weight_T_C.to(y_T_C_E.dtype)[..., None]).sum(1)

    def scores(self, x_T_E: Tensor) -> Tensor:
        """In fp32 whatever the rest is in: two experts are often close."""
        with torch.autocast(x_T_E.device.type, enabled=False):
            return torch.softmax(x_T_E.float() @ self.router_E_X.float(), dim=-1)

    def best(self, scores_T_X: Tensor) -> Tensor:
        return scores_T_X.topk(self.active, dim=-1).indices

    def _answers(self, x_T_E: Tensor, chosen_T_C: Tensor, rounding: Rounding | None) -> Tensor:
        """Of each chosen expert. Rows go back to their tokens by their places, not by adding up in any order, so that
        the same batch gives the same sums."""
        tokens, chosen = chosen_T_C.shape
        order_R = chosen_T_C.flatten().argsort(stable=True)
        x_R_E = x_T_E[order_R // chosen]
        counts = torch.bincount(chosen_T_C.flatten(), minlength=len(self.gate_up_X_E_F)).tolist()
        found: list[Tensor] = []
        for expert, rows_E in enumerate(x_R_E.split(counts)):
            if len(rows_E):
                gate_F, up_F = (rows_E @ self.gate_up_X_E_F[expert]).chunk(2, dim=-1)
                y_F = F.silu(gate_F) * up_F
                found.append((y_F if rounding is None else rounding(y_F)) @ self.down_X_F_E[expert])
        return torch.cat(found)[order_R.argsort()].view(tokens, chosen, -1)
