"""Dr.GRPO: GRPO done right (Liu et al. 2025).

A_i   = R_i - mean(R)                            no division by the standard deviation
loss  = - min(r_t A_i, clip(r_t) A_i)            summed over an answer and divided by a constant, never its length
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import DrGrpo


def advantages(settings: DrGrpo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=False) for reward_G in rewards]


def loss(settings: DrGrpo, tokens: Tokens) -> Loss:
    return clipped_loss(tokens.ratio, tokens.advantage_L, settings.clip_low, settings.clip_high)
