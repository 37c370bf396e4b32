"""PPO with a critic (Schulman et al. 2017).

    delta_t = r_t + discount V_{t+1} - V_t
    A_t     = delta_t + discount trace A_{t+1},      then (A - mean) / std over the step
    loss    = - min(r_t A_t, clip(r_t) A_t)
    critic  = (V_t - (A_t + V_t)_old)^2 / 2          with A before the normalisation

The reward of the whole answer comes with its last token, a KL penalty in the reward with each. One optimizer step is
taken per batch, so the critic's old values are its present ones and clipping them would do nothing.
"""

from collections.abc import Sequence

from torch import Tensor

from asyncrl.algorithms.advantages import Rewards
from asyncrl.algorithms.base import Loss, Tokens, clipped_loss
from asyncrl.config.algorithm import Ppo


def advantages(settings: Ppo, rewards: Sequence[Rewards]) -> list[Rewards]:
    """The plain rewards: what they are worth per token is found with the critic (`asyncrl.training.critic`)."""
    return list(rewards)


def loss(settings: Ppo, tokens: Tokens) -> Loss:
    return clipped_loss(tokens.ratio, tokens.advantage_L, settings.clip_low, settings.clip_high)


def critic_loss(value_L: Tensor, return_L: Tensor) -> Tensor:
    """One loss per token."""
    return 0.5 * (value_L - return_L).square()
