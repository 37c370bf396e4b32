"""A mixture of experts: a router sends each token to a few of many gated layers, and adds up what they answer.

    scores = softmax(x R)  in fp32        chosen = the `active` experts with the highest scores, or those of a `Route`
    y = sum of w_e * (silu(x G_e) * (x U_e)) D_e  over the chosen e;  w = their scores, divided by their sum if
                                                                          `renormalized`

Which experts are chosen has no gradient; the weights of the chosen ones have, and so the router learns. A `Route` is
asked instead of the scores where the choice was made before: in training, by the engine that sampled the token. It is
asked by the number of the layer, so a layer that is computed again in the backward chooses the same.

On a GPU in bf16 the rows of all experts are multiplied by one kernel (`asyncrl.models.grouped`), else those of one
expert after the other. Several ranks can share the experts (`asyncrl.models.expert_parallel`).

Axis suffixes as in `asyncrl.models.decoder`, and X experts, C chosen experts of a token, R rows: a token once for each
of its experts, sorted by expert.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.models import grouped
from asyncrl.models.adapters import UNCHANGED, Changes, LowRank, changed

if TYPE_CHECKING:
    from asyncrl.models.expert_parallel import ExpertGroup

Route = Callable[[int, Tensor], Tensor]
"""(layer, scores_T_X) -> chosen_T_C: the experts of each token."""
Rounding = Callable[[Tensor], Tensor]
"""What becomes of the inputs of an expert's matrices, in FP8."""


class Routing(NamedTuple):
    """What the routers of all layers with experts did in a forward. Figures are about the tokens that samples were
    predicted from, so that they do not depend on how a step is cut into batches."""

    load_N_X: Tensor
    """How often each expert of each of the N layers was chosen."""
    rerouted_L: Tensor | None
    """In what share of the layers the token that each was predicted from has replayed experts, which the router would
    not choose; None where it chooses."""
    balance_loss: Tensor | None
    """Of all tokens, where it was asked for."""


class ExpertTensors(NamedTuple):
    """Of one layer. Matrices are inputs by outputs, as in `LayerTensors`."""

    router_E_X: Tensor
    gate_up_X_E_F: Tensor
    down_X_F_E: Tensor
    active: int
    renormalized: bool
    group: "ExpertGroup | None" = None
    """The ranks that share the experts, if they do: the matrices then are those that this rank keeps."""

    def forward(
        self,
        x_T_E: Tensor,
        layer: int,
        route: Route | None,
        rounding: Rounding | None = None,
        changes: Changes = UNCHANGED,
    ) -> Tensor:
        """`x_T_E` is normalised. Scores are of what is not rounded."""
        scores_T_X = self.scores(x_T_E)
        chosen_T_C = self.best(scores_T_X) if route is None else route(layer, scores_T_X)
        weight_T_C = scores_T_X.gather(1, chosen_T_C)
        if self.renormalized:
            weight_T_C = weight_T_C / weight_T_C.sum(1, keepdim=True)
        x_T_E = x_T_E if rounding is None else rounding(x_T_E)
        if self.group is None:
            y_T_C_E = self._answers(x_T_E, chosen_T_C, rounding, changes)
        else:
            here = self._replace(
                gate_up_X_E_F=self.group.here(self.gate_up_X_E_F), down_X_F_E=self.group.here(self.down_X_F_E)
            )
            answer = partial(here._answers, rounding=rounding, changes=self.group.changes(changes))
            y_T_C_E = self.group.answers(layer, x_T_E, chosen_T_C, scores_T_X.shape[1], answer)
        return (y_T_C_E * weight_T_C.to(y_T_C_E.dtype)[..., None]).sum(1)

    def scores(self, x_T_E: Tensor) -> Tensor:
        """In fp32 whatever the rest is in: two experts are often close."""
        with torch.autocast(x_T_E.device.type, enabled=False):
            return torch.softmax(x_T_E.float() @ self.router_E_X.float(), dim=-1)

    def best(self, scores_T_X: Tensor) -> Tensor:
        return scores_T_X.topk(self.active, dim=-1).indices

    def _answers(self, x_T_E: Tensor, chosen_T_C: Tensor, rounding: Rounding | None, changes: Changes) -> Tensor:
        """Of each chosen expert."""
        together = len(x_T_E) > 0 and grouped.has_kernel(x_T_E, *self.gate_up_X_E_F.shape[1:], self.down_X_F_E.shape[1])
        answers = self._grouped_answers if together else self._looped_answers
        return answers(x_T_E, chosen_T_C, rounding, changes)

    def _grouped_answers(
        self, x_T_E: Tensor, chosen_T_C: Tensor, rounding: Rounding | None, changes: Changes
    ) -> Tensor:
        """In bf16."""
        groups = grouped.Groups.of(chosen_T_C, len(self.gate_up_X_E_F))
        x_R_E = groups.rows(x_T_E.bfloat16())
        y_R_F = _gated(groups.changed_product(x_R_E, self.gate_up_X_E_F, changes.gate_up), rounding)
        return groups.back(groups.changed_product(y_R_F, self.down_X_F_E, changes.down))

    def _looped_answers(self, x_T_E: Tensor, chosen_T_C: Tensor, rounding: Rounding | None, changes: Changes) -> Tensor:
        """Rows go back to their tokens by their places, not by adding up in any order, so that the same batch
        gives the same sums."""
        tokens, chosen = chosen_T_C.shape
        order_R = chosen_T_C.flatten().argsort(stable=True)
        x_R_E = x_T_E[order_R // chosen]
        counts = torch.bincount(chosen_T_C.flatten(), minlength=len(self.gate_up_X_E_F)).tolist()
        found: list[Tensor] = []
        for expert, rows_E in enumerate(x_R_E.split(counts)):
            if len(rows_E) or not tokens:  # of no token at all there still is a gradient
                gate_up_F = changed(rows_E @ self.gate_up_X_E_F[expert], rows_E, _of(changes.gate_up, expert))
                y_F = _gated(gate_up_F, rounding)
                found.append(changed(y_F @ self.down_X_F_E[expert], y_F, _of(changes.down, expert)))
        return torch.cat(found)[order_R.argsort()].unflatten(0, (tokens, chosen))


def _gated(gate_up_R_F: Tensor, rounding: Rounding | None) -> Tensor:
    gate_R_F, up_R_F = gate_up_R_F.chunk(2, dim=-1)
    y_R_F = F.silu(gate_R_F) * up_R_F
    return y_R_F if rounding is None else rounding(y_R_F)


def _of(change: LowRank | None, expert: int) -> LowRank | None:
    return None if change is None else LowRank(change.down_E_R[expert], change.up_R_X[expert])
