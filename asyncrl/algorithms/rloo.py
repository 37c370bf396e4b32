"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024).

A_i   = R_i - mean of the other rewards of the group
loss  = - r_t A_i                                whose gradient at r = 1 is that of - A_i log pi_theta(t)
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, leave_one_out
from asyncrl.algorithms.base import Loss, Tokens
from asyncrl.config.algorithm import Rloo


def advantages(settings: Rloo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [leave_one_out(reward_G) for reward_G in rewards]


def loss(settings: Rloo, tokens: Tokens) -> Loss:
    return Loss(-tokens.ratio * tokens.advantage_L)
