"""Low-rank changes (LoRA) to the projections of a layer, beside matrices that stay as they are.

    y = x W + (x A^T) (s B)^T       A: rank by inputs, B: outputs by rank, s = alpha / rank; B begins at zero

Each belongs to a projection as Hugging Face names it. Those that we fuse into one matrix are computed at once: their A
one below the other, their B along a diagonal.

Axis suffixes: T tokens, E inputs, R the ranks of fused projections, X outputs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn


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
    """Of one projection."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = inputs**-0.5  # as peft begins
        self.A = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        self.B = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = alpha / rank

    def scaled(self) -> Tensor:
        return self.scale * self.B


class Adapters(nn.Module):
    """Of one layer. `shapes` has the outputs and inputs of every projection, with an adapter or without."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        targets: Sequence[str],
        rank: int,
        alpha: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._shapes = shapes
        self.of = nn.ModuleDict(
            {
                name: Adapter(inputs, outputs, rank, alpha, generator)
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
        first = next(iter(found.values())).B
        ups = [found[n].scaled() if n in found else first.new_zeros(self._shapes[n][0], 0) for n in names]
        down_R_E = torch.cat([adapter.A for adapter in found.values()])
        return LowRank(down_R_E.t(), torch.block_diag(*ups).t())
