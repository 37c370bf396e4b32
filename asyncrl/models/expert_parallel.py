"""Expert parallelism: the experts of a layer over the ranks of a group, to which tokens travel and then return.

    tokens of this rank, each for some experts      routed as on one rank, by the engine's routes or the scores
      | all-to-all: counts, with a checksum; then rows, by the rank that has their expert
    rows of every rank, for the experts here        multiplied as on one rank
      | all-to-all back
    tokens of this rank                             weighted and added up as on one rank

Every rank of a replica keeps the matrices of some experts, in the order of the ranks as FSDP keeps rows of other
weights; so files, publications and optimizer treat them alike. Ranks with the same place in their groups are copies of
each other: while a layer computes they have the experts of all of them, and the group has every expert once.

Every pair of ranks compares the layer that it is at and a checksum of the rows that went from one to the other: a token
that arrives as another, or in another order, is no silent error.

Axis suffixes as in `asyncrl.models.experts`, and G ranks of the group.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from asyncrl.errors import RankError
from asyncrl.models.adapters import UNCHANGED, Changes, LowRank
from asyncrl.models.collectives import RankGroup
from asyncrl.models.grouped import Groups

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of as many bytes."""
Answer = Callable[[Tensor, Tensor], Tensor]
"""(rows_R_E, the expert here of each, R_1) -> what it answers, R_1_E."""


class ExpertGroup:
    """The ranks that have every expert once between them, of a replica of `world` ranks."""

    def __init__(self, group: RankGroup, copies: RankGroup, world: int, reduced_in: torch.dtype) -> None:
        """`copies`: the ranks with this one's place in their groups; gradients travel between them in `reduced_in`,
        if that is narrower than what is computed in."""
        self.group, self._copies, self._world, self._reduced_in = group, copies, world, reduced_in
        self._differing: Tensor | None = None

    def kept(self, matrix: Tensor) -> Tensor:
        """The rows that this rank keeps."""
        return cast("DTensor", matrix).to_local()

    def here(self, own_X_E_F: Tensor) -> Tensor:
        """The matrices of all experts that this rank computes, from those that it keeps and those of its copies."""
        own_X_F_E = own_X_E_F.mT  # as they lie in memory
        return self._copies.assemble(own_X_F_E, computed_in(own_X_E_F), self._world, self._reduced_in).mT

    def changes(self, every: Changes) -> Changes:
        """Those to experts, of all of which adapters are here."""
        return UNCHANGED._replace(gate_up=self._own(every.gate_up), down=self._own(every.down))

    def _own(self, change: LowRank | None) -> LowRank | None:
        if change is None:
            return None
        return LowRank(*(self._by_rank(factor)[:, self.group.rank].flatten(0, 1) for factor in change))

    def _by_rank(self, x_X: Tensor) -> Tensor:
        """What there is for each expert, by copy, rank of the group, and expert that they keep."""
        return x_X.unflatten(0, (self._world // self.group.size, self.group.size, -1))

    def answers(self, layer: int, x_T_E: Tensor, chosen_T_C: Tensor, experts: int, answer: Answer) -> Tensor:
        """T_C_E: of each token the answers of its experts."""
        numbers_X = torch.arange(experts, device=x_T_E.device)
        place_X = torch.empty_like(numbers_X)  # of an expert in the order of the ranks that compute it
        place_X[self._by_rank(numbers_X).transpose(0, 1).flatten()] = numbers_X
        groups, x_T_E = Groups.of(place_X[chosen_T_C], experts), x_T_E.to(computed_in(x_T_E))
        x_R_E, ends_X = groups.rows(x_T_E), groups.ends_X.long()
        sizes_G_X = ends_X.diff(prepend=ends_X.new_zeros(1)).view(self.group.size, -1)
        header_G_X = torch.cat([self._sums(x_R_E, sizes_G_X.sum(1)), sizes_G_X], 1)
        header_G_X = torch.cat([torch.full_like(header_G_X[:, :1], layer), header_G_X], 1)
        ones = [1] * self.group.size
        found_G_X = self.group.exchange(header_G_X, ones, ones)
        # The one wait for the device: nobody can receive rows without knowing how many.
        mine, theirs = torch.stack([header_G_X, found_G_X]).tolist()
        self._check_layers(layer, [header[0] for header in theirs])
        sent, received = [sum(header[2:]) for header in mine], [sum(header[2:]) for header in theirs]
        rows_R_E = self.group.exchange(x_R_E, sent, received)
        self._compare(layer, self._sums(rows_R_E, found_G_X[:, 2:].sum(1)).squeeze(1), found_G_X[:, 1])
        here_X = torch.arange(sizes_G_X.shape[1], device=x_T_E.device).repeat(self.group.size)
        expert_R = torch.repeat_interleave(here_X, found_G_X[:, 2:].flatten(), output_size=sum(received))
        y_R_E = answer(rows_R_E, expert_R[:, None]).squeeze(1)
        return groups.back(self.group.exchange(y_R_E, received, sent))

    @torch.no_grad()
    def _sums(self, x_R_E: Tensor, rows_G: Tensor) -> Tensor:
        """G_1: of the rows of each rank, one behind the other, the sum of their bits times their places."""
        bits_R = x_R_E.contiguous().view(BITS[x_R_E.element_size()]).sum(1)
        end_G = rows_G.cumsum(0)
        numbers_R = torch.arange(len(x_R_E), device=x_R_E.device)
        rank_R = torch.searchsorted(end_G, numbers_R, right=True)
        place_R = numbers_R - (end_G - rows_G)[rank_R] + 1
        return torch.zeros_like(rows_G).scatter_add_(0, rank_R, bits_R * place_R)[:, None]

    def _check_layers(self, layer: int, others: Sequence[int]) -> None:
        for rank, other in enumerate(others):
            if other != layer:
                raise RankError(
                    f"trainer.expert_parallel: rank {self.group.rank} of a group is at layer {layer} and rank {rank} "
                    f"at layer {other}, so they cannot exchange tokens; resume the run from its last checkpoint"
                )

    def _compare(self, layer: int, found_G: Tensor, told_G: Tensor) -> None:
        """Remembered on the device, which nobody waits for: layer * G + rank + 1 of any that differs."""
        numbers_G = torch.arange(len(told_G), device=told_G.device) + layer * len(told_G) + 1
        differing = ((found_G != told_G) * numbers_G).max()
        self._differing = differing if self._differing is None else torch.maximum(self._differing, differing)

    def mismatch(self) -> str:
        """What arrived otherwise than it was sent since the last call; nothing, as a rule."""
        found, self._differing = self._differing, None
        number = 0 if found is None else int(found)
        if not number:
            return ""
        layer, rank = divmod(number - 1, self.group.size)
        return (
            f"trainer.expert_parallel: the tokens that rank {self.group.rank} of a group received in layer {layer} are "
            f"not those that rank {rank} sent; resume the run from its last checkpoint"
        )


def computed_in(x: Tensor) -> torch.dtype:
    """What it is multiplied in: narrow under autocast, and then no more than that travels."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
