"""REINFORCE++ (Hu 2025): the clipped loss with advantages normalised over the step.

    A_t   = sum_{k >= t} (R [k is last] - beta kl_k),  then (A - mean) / std over the step
    loss  = - min(r_t A_t, clip(r_t) A_t)

Without a penalty in the reward (beta = 0) the advantage is that of the sample, which is what `advantages` gives. With
one it gives the rewards themselves, and what they are worth per token is found in `asyncrl.training.advantages`.
"""

from collections.abc import Sequence

from asyncrl.algorithms.advantages import Rewards, group_relative, step_relative
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import ReinforcePp


def advantages(settings: ReinforcePp, rewards: Sequence[Rewards]) -> list[Rewards]:
    if settings.kl.coefficient and settings.kl.placement == "reward":
        return [group_relative(r, normalize_std=False) if settings.group_baseline else r for r in rewards]
    return step_relative(rewards, group_baseline=settings.group_baseline)


def loss(settings: ReinforcePp, tokens: Tokens) -> Loss:
    return clipped_loss(tokens.ratio, tokens.advantage_L, settings.clip_low, settings.clip_high)
