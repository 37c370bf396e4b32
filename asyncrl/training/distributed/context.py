"""Context parallelism: one batch over several ranks, each with some of its tokens (Ulysses).

    own tokens, all heads        norms, projections, gated layers, experts, logits: on the rank's own tokens
      | all-to-all: queries, keys and values
    all tokens, own heads        attention, as on one rank, but of fewer heads
      | all-to-all: what attention made of them
    own tokens, all heads
      | gather: log-probabilities, entropies, values
    all sampled tokens           losses and figures, the same on every rank of the group

Flat tokens are cut into runs of equal length, wherever a sample ends: only attention sees more than its own tokens, and
it has all of them. So nothing else knows of the cut, and the log-probabilities are those of one rank. Every rank of the
group computes the same loss; its backward begins at its own rows and comes back to it through the all-to-alls, so that
the gradients of the ranks add up to those of one.

Heads need not divide: some ranks then have one more than others (`asyncrl.models.head_shares`).

Axis suffixes: T all tokens of a batch, L its sampled tokens, t and l those of this rank, H query heads, K key/value
heads, A all of them, D head dimension, S and R what is sent and received.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.models.collectives import RankGroup
from asyncrl.models.head_shares import HeadShare, head_shares
from asyncrl.models.layers import Attend


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank computes of a batch: all of it, unless a group shares it."""

    tokens_T: Tensor
    positions_T: Tensor
    predict_L: Tensor
    target_L: Tensor
    routes_T_L_C: Tensor | None
    group: RankGroup | None = None
    sizes: tuple[int, ...] = ()
    """Tokens of each rank."""
    place_L: Tensor | None = None
    """Where each sampled token is in what the ranks gather."""
    most: int = 0
    """Sampled tokens of the rank that has the most."""
    teacher_top_L_X: Tensor | None = None

    def of(self, group: RankGroup) -> Self:
        """From a batch that is whole, and on the host still."""
        tokens, ranks = len(self.tokens_T), np.arange(group.size)
        ends = (ranks + 1) * tokens // group.size
        predict = self.predict_L.numpy()
        owner = np.searchsorted(ends, predict, side="right")
        counts = np.bincount(owner, minlength=group.size)
        place = np.empty(len(predict), np.int64)
        for rank in range(group.size):
            place[owner == rank] = rank * counts.max() + np.arange(counts[rank])
        begin, end = int(group.rank * tokens // group.size), int(ends[group.rank])
        own = torch.from_numpy(owner == group.rank)
        return replace(
            self,
            tokens_T=self.tokens_T[begin:end],
            positions_T=self.positions_T[begin:end],
            predict_L=self.predict_L[own] - begin,
            target_L=self.target_L[own],
            routes_T_L_C=None if self.routes_T_L_C is None else self.routes_T_L_C[begin:end],
            teacher_top_L_X=None if self.teacher_top_L_X is None else self.teacher_top_L_X[own],
            group=group,
            sizes=tuple(np.diff(ends, prepend=0).tolist()),
            place_L=torch.from_numpy(place),
            most=int(counts.max(initial=0)),
        )

    def to(self, device: torch.device) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)})

    @property
    def total_tokens(self) -> int:
        """Of the whole batch."""
        return sum(self.sizes) or len(self.tokens_T)

    def whole(self, x_L_X: Tensor) -> Tensor:
        """Of every sampled token of the batch, from what is here; on every rank the same."""
        if self.group is None or self.place_L is None:
            return x_L_X
        padded = functional.pad(x_L_X, (*[0] * (2 * x_L_X.ndim - 1), self.most - len(x_L_X)))
        return self.group.gather(padded).index_select(0, self.place_L)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the parts of the batch."""
        return x if self.group is None else self.group.total(x)

    def attend(self, attend: Attend, *, narrow: bool) -> Attend:
        """Attention of this rank's tokens by one of all tokens. With `narrow` bf16 travels, which it rounds to."""
        group, sizes = self.group, self.sizes
        if group is None:
            return attend
        ranks, tokens, own = group.size, sum(sizes), sizes[group.rank]

        def over_ranks(layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
            dim = q_T_H_D.shape[2]
            shares = head_shares(q_T_H_D.shape[1], k_T_K_D.shape[1], ranks)
            here = shares[group.rank]
            if narrow:
                q_T_H_D, k_T_K_D, v_T_K_D = q_T_H_D.bfloat16(), k_T_K_D.bfloat16(), v_T_K_D.bfloat16()
            parts = [torch.cat([q_T_H_D[:, s.queries], k_T_K_D[:, s.keys], v_T_K_D[:, s.keys]], 1) for s in shares]
            sent_S_D = torch.cat([part.flatten(0, 1) for part in parts])
            found_R_D = group.exchange(
                sent_S_D, [own * share.num_sent for share in shares], [size * here.num_sent for size in sizes]
            )
            found_T_A_D = found_R_D.view(tokens, here.num_sent, dim)
            y_T_X = found_T_A_D.flatten(1)  # of a rank without heads, which computes nothing but takes part
            if here.num_queries:
                q_T_H_D, k_T_K_D, v_T_K_D = found_T_A_D.split((here.num_queries, here.num_keys, here.num_keys), 1)
                y_T_X = attend(layer, q_T_H_D, _copied(k_T_K_D, here), _copied(v_T_K_D, here))
            heads = [share.num_queries for share in shares]
            found_R_D = group.exchange(
                y_T_X.reshape(-1, dim), [size * here.num_queries for size in sizes], [own * each for each in heads]
            )
            answers = zip(found_R_D.split([own * each for each in heads]), heads, strict=True)
            return torch.cat([answer.view(own, each * dim) for answer, each in answers], 1)

        return over_ranks


def _copied(x_T_K_D: Tensor, share: HeadShare) -> Tensor:
    """Where a rank's queries are not as many for each of its key/value heads."""
    if max(share.copies) == 1:
        return x_T_K_D
    copies = enumerate(share.copies)
    return torch.cat([x_T_K_D[:, head : head + 1].expand(-1, times, -1) for head, times in copies], 1)
