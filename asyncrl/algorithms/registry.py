"""Every algorithm and correction, by its settings: the one place where they are chosen.

A new one is its settings in `asyncrl.config.algorithm`, a function (in losses.py, advantages.py or corrections.py, or
in a file of its own), and a line here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from asyncrl.algorithms import advantages, corrections, losses
from asyncrl.algorithms.advantages import Rewards
from asyncrl.algorithms.base import Loss, Samples, Tokens
from asyncrl.algorithms.corrections import Corrected
from asyncrl.config.algorithm import (
    AlgorithmBase,
    Cispo,
    CorrectionBase,
    CustomAlgorithm,
    CustomCorrection,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Importance,
    Ppo,
    ReinforcePp,
    Rloo,
    Supervised,
)
from asyncrl.system.user_functions import load_function


class Entry(NamedTuple):
    """Both functions are called with the settings first."""

    advantages: Callable[[Any, Sequence[Rewards]], list[Rewards]]
    """Of each group, from its rewards; called with one group after the other, or with the whole step."""
    loss: Callable[[Any, Tokens], Loss]
    turns: Callable[[Any, Sequence[Rewards]], list[Rewards] | None] = lambda _settings, _rewards: None
    """Of the turns of one group, from the rewards of those of each sample; None: it knows whole samples only."""
    whole_step: bool = False
    """Whether `advantages` gives rewards, of which `asyncrl.training.advantages` makes those of tokens, normalised over
    the step: no work can begin before the step is complete. Rewards of turns are among them."""


ALGORITHMS: dict[type[AlgorithmBase], Entry] = {
    Grpo: Entry(advantages.relative_to_group, losses.clipped, advantages.turns_relative_to_group),
    DrGrpo: Entry(advantages.centered, losses.clipped, advantages.turns_centered),
    Dapo: Entry(advantages.normalized, losses.clipped, advantages.turns_normalized),
    Rloo: Entry(advantages.against_the_others, losses.plain, advantages.turns_against_the_others),
    ReinforcePp: Entry(advantages.before_whitening, losses.clipped, whole_step=True),
    Ppo: Entry(advantages.rewards_alone, losses.clipped, whole_step=True),
    Gspo: Entry(advantages.relative_to_group, losses.sequence_clipped, advantages.turns_relative_to_group),
    Cispo: Entry(advantages.relative_to_group, losses.capped, advantages.turns_relative_to_group),
    Supervised: Entry(advantages.rewards_alone, losses.supervised),
    CustomAlgorithm: Entry(advantages.custom, losses.custom, advantages.turns_of_custom),
}
CORRECTIONS: dict[type[CorrectionBase], Callable[[Any, Tensor, Tensor, Samples], Corrected]] = {
    Importance: corrections.importance,
    CustomCorrection: corrections.custom,
}
"""Each is called with its settings, log pi, log mu and the samples."""


def entry(settings: AlgorithmBase) -> Entry:
    """ConfigError if a function of the user's cannot be loaded."""
    for field, location in settings.functions:
        load_function(location, field)
    return ALGORITHMS[type(settings)]


def correct(settings: CorrectionBase, logp_L: Tensor, behaviour_logp_L: Tensor, samples: Samples) -> Corrected:
    return CORRECTIONS[type(settings)](settings, logp_L, behaviour_logp_L, samples)
