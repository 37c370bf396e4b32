"""GSPO (Zheng et al. 2025): the ratio of a whole answer, free of its length.

s_i   = exp(mean_t log(pi_theta(t) / pi_prox(t)))
loss  = - min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)   for each token; aggregated over sequences
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import Gspo


def advantages(settings: Gspo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]


def loss(settings: Gspo, tokens: Tokens) -> Loss:
    ratio_S = tokens.samples.mean(tokens.logp_L - tokens.proximal_logp_L).exp()
    return clipped_loss(tokens.samples.spread(ratio_S), tokens.advantage_L, settings.clip_low, settings.clip_high)
