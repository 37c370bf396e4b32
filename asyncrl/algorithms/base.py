"""What a loss sees and returns. Axis suffix L: the sampled tokens of one packed batch, samples one after the other."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Tokens:
    """One entry per sampled token."""

    logp_L: torch.Tensor
    """Under the weights being trained; carries the gradient."""
    proximal_logp_L: torch.Tensor
    """Under the policy that the clipped ratio is taken against; no gradient."""
    weight_L: torch.Tensor
    """Importance weight of the correction; no gradient."""
    advantage_L: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Sums over tokens, never means: the trainer divides by the token count of the whole step."""

    loss: torch.Tensor
    sums: dict[str, float] = field(default_factory=dict[str, float])
