"""CISPO (MiniMax 2025): the ratio is clipped as a constant, and every token keeps its gradient.

loss  = - sg[min(r_t, cap)] A_i log pi_theta(t)
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens
from asyncrl.config.algorithm import Cispo


def advantages(settings: Cispo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]


def loss(settings: Cispo, tokens: Tokens) -> Loss:
    ratio_L = tokens.ratio.detach()
    clipped = (ratio_L > settings.cap).sum()
    return Loss(-ratio_L.clamp(max=settings.cap) * tokens.advantage_L * tokens.logp_L, {"clipped": clipped})
