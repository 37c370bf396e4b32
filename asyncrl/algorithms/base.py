"""What a loss sees and returns.

Axis suffixes: L the sampled tokens of one packed batch, samples one after the other; S its samples.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Which sample each token belongs to."""

    sample_L: Tensor
    count: int
    age_L: Tensor
    """Versions between the weights that sampled a token and those that are being trained."""

    def sum(self, value_L: Tensor) -> Tensor:
        return value_L.new_zeros(self.count).index_add(0, self.sample_L, value_L)

    @property
    def lengths(self) -> Tensor:
        ones_L = torch.ones_like(self.sample_L)
        return ones_L.new_zeros(self.count).index_add(0, self.sample_L, ones_L)  # `bincount` waits for a GPU

    def mean(self, value_L: Tensor) -> Tensor:
        return self.sum(value_L) / self.lengths.clamp(min=1)

    def max(self, value_L: Tensor) -> Tensor:
        lowest_S = value_L.new_full((self.count,), -torch.inf)
        return lowest_S.scatter_reduce(0, self.sample_L, value_L, "amax")

    def running_sum(self, value_L: Tensor) -> Tensor:
        """Over the tokens of the same sample up to each one, itself included."""
        total_L = value_L.cumsum(0)
        before_S = torch.cat([value_L.new_zeros(1), total_L])[self.lengths.cumsum(0) - self.lengths]
        return total_L - self.spread(before_S)

    def spread(self, value_S: Tensor) -> Tensor:
        """A value of the sample for each of its tokens."""
        return value_S.index_select(0, self.sample_L)


@dataclass(frozen=True, slots=True)
class Tokens:
    """One entry per sampled token."""

    logp_L: Tensor
    """Under the weights being trained; carries the gradient."""
    proximal_logp_L: Tensor
    """Under the policy that the algorithm's ratio is taken against; no gradient."""
    advantage_L: Tensor
    samples: Samples

    @property
    def ratio(self) -> Tensor:
        return (self.logp_L - self.proximal_logp_L).exp()


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss per token; weights, aggregation and penalties are not its business."""

    loss_L: Tensor
    sums: dict[str, float | Tensor] = field(default_factory=dict[str, "float | Tensor"])
    """Counts for the metrics, added up over the step; numbers on a GPU may stay there."""
