"""Advantages from rewards.

    normalized           A_i = (R_i - mean(R)) / std(R) over the group         DAPO
    centered             A_i = R_i - mean(R): no division, so no bias by it    Dr.GRPO
    relative_to_group    either of them, as `normalize_std` says               GRPO, GSPO, CISPO
    against_the_others   A_i = R_i - mean of the other rewards of the group    RLOO
    before_whitening     R, or R - mean(R) with `group_baseline`               REINFORCE++
    rewards_alone        R                                                     PPO, SFT (whose loss has none)

In an episode a turn may have a reward of its own: then R is that of a turn, the episode's and its own, and a baseline
is made of episodes, each of which is the mean over its turns (`turns_relative_to_group` and the functions below it).

Of the last two `asyncrl.training.advantages` makes advantages of tokens, normalised over all tokens of the step: with
`gae` and a critic for PPO, without a critic for REINFORCE++.

The first part is what registry.py chooses from: functions of the settings and of the rewards of some groups. Below are
the formulas that they are made of, and those of single tokens, which `asyncrl.training.advantages` uses. R includes the
overlong penalty. Axis suffixes: G samples of a group, L tokens of a sample or of a packed batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.algorithm import AlgorithmBase, Cispo, CustomAlgorithm, Grpo, Gspo, Overlong, ReinforcePp
from asyncrl.config.distillation import Distillation
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import calling, load_function

Rewards = npt.NDArray[np.float64]
EPSILON = 1e-6
EXPECTED = "f(rewards of a group: numpy array) that returns an advantage for each"
"""Of advantages of the user's."""


def relative_to_group(settings: Grpo | Gspo | Cispo | CustomAlgorithm, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]


def normalized(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=True) for reward_G in rewards]


def centered(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [group_relative(reward_G, normalize_std=False) for reward_G in rewards]


def against_the_others(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [leave_one_out(reward_G) for reward_G in rewards]


def before_whitening(settings: ReinforcePp, rewards: Sequence[Rewards]) -> list[Rewards]:
    """A_t = sum_{k >= t} (R [k is last] - beta kl_k), then (A - mean) / std over every token of the step (Hu 2025):
    R is given here, and `asyncrl.training.advantages` finds the rest."""
    return centered(settings, rewards) if settings.group_baseline else list(rewards)


def rewards_alone(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return list(rewards)


# Of turns: for each sample of one group the rewards of its turns.


def turns_relative_to_group(settings: Grpo | Gspo | Cispo, rewards: Sequence[Rewards]) -> list[Rewards]:
    return turns_relative(rewards, normalize_std=settings.normalize_std)


def turns_normalized(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return turns_relative(rewards, normalize_std=True)


def turns_centered(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    return turns_relative(rewards, normalize_std=False)


def turns_against_the_others(settings: AlgorithmBase, rewards: Sequence[Rewards]) -> list[Rewards]:
    """A group of one has nothing to compare with."""
    mean_G = np.array([reward_N.mean() for reward_N in rewards])
    others = len(rewards) - 1
    return [
        reward_N - (mean_G.sum() - mean) / others if others else np.zeros_like(reward_N)
        for reward_N, mean in zip(rewards, mean_G, strict=True)
    ]


def turns_of_custom(settings: CustomAlgorithm, rewards: Sequence[Rewards]) -> list[Rewards] | None:
    """None for a function of the user's, which knows the rewards of samples only."""
    return None if settings.advantages else turns_relative(rewards, normalize_std=settings.normalize_std)


# The user's own.


def custom(settings: CustomAlgorithm, rewards: Sequence[Rewards]) -> list[Rewards]:
    """The user's own, or group-relative ones."""
    if not settings.advantages:
        return relative_to_group(settings, rewards)
    own = load_function(settings.advantages, "algorithm.advantages")
    with calling("algorithm.advantages", settings.advantages, EXPECTED):
        return [_checked(own(reward_G), reward_G, settings.advantages) for reward_G in rewards]


def _checked(given: Any, reward_G: Rewards, location: str) -> Rewards:
    advantage_G = np.asarray(given, dtype=reward_G.dtype)
    if advantage_G.shape != reward_G.shape or not np.isfinite(advantage_G).all():
        raise ConfigError(
            f"algorithm.advantages={location} returned {given!r:.200} for {len(reward_G)} rewards; return one finite "
            "number for each"
        )
    return advantage_G


def group_relative(reward_G: Rewards, *, normalize_std: bool) -> Rewards:
    """A = r - mean(r), divided by std(r) where asked. All rewards equal: every advantage is exactly 0."""
    if np.all(reward_G == reward_G[0]):
        return np.zeros_like(reward_G)
    centered_G = reward_G - reward_G.mean()
    return centered_G / (reward_G.std() + EPSILON) if normalize_std else centered_G


def turns_relative(rewards: Sequence[Rewards], *, normalize_std: bool) -> list[Rewards]:
    """The same of N turns in each sample. In mean and deviation every sample counts as much as another, however many
    turns it has, and so does every turn of a sample."""
    everything = np.concatenate(rewards)
    if np.all(everything == everything[0]):
        return [np.zeros_like(reward_N) for reward_N in rewards]
    mean = np.mean([reward_N.mean() for reward_N in rewards])
    centered = [reward_N - mean for reward_N in rewards]
    std = np.sqrt(np.mean([np.square(reward_N).mean() for reward_N in centered]))
    return [reward_N / (std + EPSILON) for reward_N in centered] if normalize_std else centered


def leave_one_out(reward_G: Rewards) -> Rewards:
    """A_i = r_i - mean of the others = G / (G - 1) (r_i - mean(r)). A group of one has nothing to compare with."""
    count = len(reward_G)
    return group_relative(reward_G, normalize_std=False) * (count / (count - 1) if count > 1 else 0.0)


def overlong_penalty(settings: Overlong, lengths: npt.NDArray[np.int64], max_tokens: int) -> Rewards:
    """0 up to max_tokens (1 - margin), then a straight line down to -penalty at max_tokens."""
    if not settings.penalty:
        return np.zeros(len(lengths))
    margin = max(settings.margin * max_tokens, 1.0)
    inside = (lengths.astype(np.float64) - (max_tokens - margin)) / margin
    return -settings.penalty * inside.clip(0.0, 1.0)


def gae(reward_L: Tensor, value_L: Tensor, lengths: Sequence[int], discount: float, trace: float) -> Tensor:
    """Generalised advantage estimation over samples that lie one behind the other.

    delta_t = r_t + discount V_{t+1} - V_t,  A_t = delta_t + discount trace A_{t+1};  behind the last token V = A = 0.
    """
    reward, value = reward_L.tolist(), value_L.tolist()
    advantage = [0.0] * len(reward)
    end = 0
    for length in lengths:
        following = carried = 0.0
        for t in range(end + length - 1, end - 1, -1):
            carried = reward[t] + discount * following - value[t] + discount * trace * carried
            advantage[t], following = carried, value[t]
        end += length
    return torch.tensor(advantage, dtype=value_L.dtype, device=value_L.device)


def towards_teacher(settings: Distillation, advantage_L: Tensor, logp_L: Tensor, teacher_logp_L: Tensor) -> Tensor:
    """A'_t = reward A_t + coefficient (log p_teacher(t) - log pi(t)), of any algorithm: on tokens of pi the expected
    gradient of the second term is that of - KL(pi || teacher) at each token, what comes after it left out."""
    return settings.reward * advantage_L + settings.coefficient * (teacher_logp_L - logp_L)


def whitened(parts: Sequence[Tensor]) -> list[Tensor]:
    """Mean 0 and standard deviation 1 over all parts together."""
    everything = torch.cat(list(parts))
    return [standardized(part, everything) for part in parts]


def standardized(part: Tensor, everything: Tensor) -> Tensor:
    """By the mean and standard deviation of everything that it is a part of; exactly 0 if all of it is equal."""
    mean, std = everything.mean(), everything.std(correction=0)
    differs = everything.max() > everything.min()  # rounded, the mean of equal numbers may be another number
    return torch.where(differs, (part - mean) / (std + EPSILON), 0.0)
