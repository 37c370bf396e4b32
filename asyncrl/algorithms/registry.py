"""Every algorithm by the name that configs use. A new one is a file with `advantages` and `loss`, and a line here."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.algorithms import cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce_pp, rloo
from asyncrl.algorithms.advantages import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens
from asyncrl.config.algorithm import Algorithm, CustomAlgorithm
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import load_function


class Entry(NamedTuple):
    advantages: Callable[[Any, Sequence[Rewards]], list[Rewards]]
    """Of each group, from its rewards; called with one group after the other, or with the whole step."""
    loss: Callable[[Any, Tokens], Loss]
    whole_step: bool = False
    """Whether advantages depend on every sample of the step, so that no work can begin before it is complete."""


REGISTRY = {
    "grpo": Entry(grpo.advantages, grpo.loss),
    "dr_grpo": Entry(dr_grpo.advantages, dr_grpo.loss),
    "dapo": Entry(dapo.advantages, dapo.loss),
    "rloo": Entry(rloo.advantages, rloo.loss),
    "reinforce_pp": Entry(reinforce_pp.advantages, reinforce_pp.loss, whole_step=True),
    "ppo": Entry(ppo.advantages, ppo.loss, whole_step=True),
    "gspo": Entry(gspo.advantages, gspo.loss),
    "cispo": Entry(cispo.advantages, cispo.loss),
}


def entry(settings: Algorithm) -> Entry:
    return _custom(settings) if isinstance(settings, CustomAlgorithm) else REGISTRY[str(settings.__struct_config__.tag)]


def _custom(settings: CustomAlgorithm) -> Entry:
    function = load_function(settings.function, "algorithm.function")

    def advantages(_: CustomAlgorithm, rewards: Sequence[Rewards]) -> list[Rewards]:
        if settings.advantages:
            own = load_function(settings.advantages, "algorithm.advantages")
            return [_own(own(reward_G), reward_G, settings.advantages) for reward_G in rewards]
        return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]

    def loss(_: CustomAlgorithm, tokens: Tokens) -> Loss:
        return Loss(function(tokens))

    return Entry(advantages, loss)


def _own(given: Any, reward_G: Rewards, location: str) -> Rewards:
    advantage_G = np.asarray(given, dtype=reward_G.dtype)
    if advantage_G.shape != reward_G.shape or not np.isfinite(advantage_G).all():
        raise ConfigError(
            f"algorithm.advantages={location} returned {given!r:.200} for {len(reward_G)} rewards; return one finite "
            "number for each"
        )
    return advantage_G
