"""Low-rank changes (LoRA) to the projections of a layer, beside matrices that stay as they are.

    y = x W + (x A^T) (s B)^T       A: rank by inputs, B: outputs by rank, s = alpha / rank; B begins at zero

Each belongs to a projection as Hugging Face names it. Those that we fuse into one matrix are computed at once: their A
one below the other, their B along a diagonal. Of experts each has its own, which lie one below the other as their
matrices do; the router has none.

Axis suffixes: T tokens, E inputs, R the ranks of fused projections, X outputs. Changes to experts have one axis more,
the experts, in front.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.models.config import ATTENTION

EVERY = "*"
"""In the name of a module: all layers, or all experts of one."""


class LowRank(NamedTuple):
    down_E_R: Tensor
    up_R_X: Tensor

    def change(self, x_T_E: Tensor) -> Tensor:
        return (x_T_E @ self.down_E_R) @ self.up_R_X


class Changes(NamedTuple):
    """To the matrices of a layer; None where nothing changes."""

    qkv: LowRank | None
    out: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


UNCHANGED = Changes(None, None, None, None)


def changed(y_T_X: Tensor, x_T_E: Tensor, change: LowRank | None) -> Tensor:
    return y_T_X if change is None else y_T_X + change.change(x_T_E)


class Adapter(nn.Module):
    """Of one projection, or of this projection of each expert."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, alpha: float, generator: torch.Generator, experts: int | None = None
    ) -> None:
        super().__init__()
        self.experts, copies = experts, 1 if experts is None else experts
        bound = inputs**-0.5  # as peft begins
        self.A = nn.Parameter(torch.empty(copies * rank, inputs).uniform_(-bound, bound, generator=generator))
        self.B = nn.Parameter(torch.zeros(copies * outputs, rank))
        self.scale = alpha / rank

    def scaled(self) -> Tensor:
        return self.scale * self.B

    def by_expert(self, factor: Tensor) -> Tensor:
        """A view of A or B, or of what has their shape, with the experts in front, if there are any."""
        return factor if self.experts is None else factor.unflatten(0, (self.experts, -1))


class Adapters(nn.Module):
    """Of one layer. `shapes` has the outputs and inputs of every projection, with an adapter or without; with `experts`
    each of these has its own gated projections."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        targets: Sequence[str],
        rank: int,
        alpha: float,
        generator: torch.Generator,
        experts: int | None = None,
    ) -> None:
        super().__init__()
        self._shapes = shapes
        self.of = nn.ModuleDict(
            {
                name: Adapter(inputs, outputs, rank, alpha, generator, None if name in ATTENTION else experts)
                for name, (outputs, inputs) in shapes.items()
                if name in targets
            }
        )

    def changes(self) -> Changes:
        return Changes(
            self._fused("q_proj", "k_proj", "v_proj"),
            self._fused("o_proj"),
            self._fused("gate_proj", "up_proj"),
            self._fused("down_proj"),
        )

    def _fused(self, *names: str) -> LowRank | None:
        found = {name: cast(Adapter, self.of[name]) for name in names if name in self.of}
        if not found:
            return None
        down_R_E = torch.cat([adapter.by_expert(adapter.A) for adapter in found.values()], dim=-2)
        rank, all_ranks = 0, down_R_E.shape[-2]
        ups: list[Tensor] = []
        for name in names:
            if name in found:
                up_X_R = found[name].by_expert(found[name].scaled())
            else:
                up_X_R = down_R_E.new_zeros(*down_R_E.shape[:-2], self._shapes[name][0], 0)
            ups.append(functional.pad(up_X_R, (rank, all_ranks - rank - up_X_R.shape[-1])))
            rank += up_X_R.shape[-1]
        return LowRank(down_R_E.mT, torch.cat(ups, dim=-2).mT)
