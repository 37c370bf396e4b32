"""Off-policy corrections: which policy the ratio is taken against, and the weight each token gets.

mu is the policy that sampled (its own processed log-probabilities), pi the trainer's before the update. One optimizer
step is made per batch, so pi is the very policy being differentiated and no second forward is needed.

    none       prox = mu,  w = 1                   (the clipped ratio itself carries the correction)
    token_tis  prox = pi,  w = min(pi / mu, cap)
"""

import torch

from asyncrl.algorithms.settings import Correction, TokenTis

LOG_RATIO_BOUND = 20.0
"""exp(20) is beyond any useful weight; the bound keeps one absurd token from making the sums infinite."""


def log_ratio(logp_L: torch.Tensor, behaviour_logp_L: torch.Tensor) -> torch.Tensor:
    """log pi / mu, detached and bounded."""
    return (logp_L.detach() - behaviour_logp_L).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def apply(
    correction: Correction, logp_L: torch.Tensor, behaviour_logp_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the proximal log-probabilities and the token weights."""
    if isinstance(correction, TokenTis):
        weight_L = log_ratio(logp_L, behaviour_logp_L).exp().clamp(max=correction.cap)
        return logp_L.detach(), weight_L
    return behaviour_logp_L, torch.ones_like(behaviour_logp_L)
