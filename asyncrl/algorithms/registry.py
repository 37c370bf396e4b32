"""Every algorithm by the name that configs use. A new one is a file with `advantages` and `loss`, and a line here."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncrl.algorithms import cispo, dapo, dr_grpo, grpo, gspo, ppo, reinforce_pp, rloo
from asyncrl.algorithms.advantage import Rewards, group_relative
from asyncrl.algorithms.base import Loss, Tokens
from asyncrl.algorithms.settings import Algorithm, CustomAlgorithm
from asyncrl.functions import load_function


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
        return [group_relative(reward_G, normalize_std=settings.normalize_std) for reward_G in rewards]

    def loss(_: CustomAlgorithm, tokens: Tokens) -> Loss:
        return Loss(function(tokens))

    return Entry(advantages, loss)
