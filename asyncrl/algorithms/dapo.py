"""DAPO (Yu et al. 2025): GRPO with clip-higher and a mean over all tokens.

    A_i   = (R_i - mean(R)) / std(R),  R_i with the overlong penalty of `advantage.overlong_penalty`
    loss  = - min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)

Dynamic sampling, its fourth part, happens where groups become complete: in the trajectory buffer.
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import Dapo


def advantages(settings: Dapo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=True) for reward_G in rewards]


def loss(settings: Dapo, tokens: Tokens) -> Loss:
    return clipped_loss(tokens.ratio, tokens.advantage_L, settings.clip_low, settings.clip_high)
