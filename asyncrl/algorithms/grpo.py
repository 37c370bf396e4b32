"""GRPO with asymmetric clipping (Shao et al. 2024).

A_i   = (R_i - mean(R)) / std(R)                 over the group
r_t   = pi_theta(t) / pi_prox(t)
loss  = - min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import Grpo


def advantages(settings: Grpo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]


def loss(settings: Grpo, tokens: Tokens) -> Loss:
    return clipped_loss(tokens.ratio, tokens.advantage_L, settings.clip_low, settings.clip_high)
