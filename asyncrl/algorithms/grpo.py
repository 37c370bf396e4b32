"""GRPO with asymmetric clipping.

    r_t  = pi_theta(t) / pi_prox(t)
    loss = - sum_t  w_t * min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

w_t is the correction's importance weight, a constant to the gradient; it multiplies the whole clipped term.
"""

from asyncrl.algorithms.base import LossOutput, Tokens
from asyncrl.algorithms.settings import Grpo


def loss(settings: Grpo, tokens: Tokens) -> LossOutput:
    ratio_L = (tokens.logp_L - tokens.proximal_logp_L).exp()
    clipped_L = ratio_L.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective_L = (ratio_L * tokens.advantage_L).minimum(clipped_L * tokens.advantage_L)
    clipped = (clipped_L * tokens.advantage_L < ratio_L * tokens.advantage_L).sum()
    return LossOutput(-(tokens.weight_L * objective_L).sum(), {"clipped": float(clipped)})
