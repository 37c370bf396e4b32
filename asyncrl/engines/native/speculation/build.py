"""From a drafter's settings to what speculation needs."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.drafting.bandit import PLAIN, Bandit, Range, strategies
from asyncrl.drafting.checkpoint import fresh_head, load_head
from asyncrl.drafting.heads import Head
from asyncrl.drafting.settings import (
    DrafterSettings,
    Eagle3Drafter,
    EagleDrafter,
    NoDrafter,
    Strategy,
)
from asyncrl.engines.native.speculation.source import Always, Chooser
from asyncrl.models.config import ModelConfig

FRESH_SEED = 0
"""All replicas begin with the same head."""


def possible_strategies(drafter: DrafterSettings) -> list[Strategy]:
    """All that may be chosen, plain decoding perhaps among them."""
    if isinstance(drafter, NoDrafter):
        return [PLAIN]
    return strategies(drafter) if drafter.adaptive.on else [drafter.strategy]


def has_trees(drafter: DrafterSettings) -> bool:
    return any(strategy.is_tree for strategy in possible_strategies(drafter))


def spare_slots(drafter: DrafterSettings) -> int:
    """How many tokens a row may compute behind its end."""
    return max(max(strategy.nodes, strategy.depth * strategy.top_k) for strategy in possible_strategies(drafter))


def build_head(drafter: EagleDrafter | Eagle3Drafter, target: ModelConfig) -> Head:
    return load_head(Path(drafter.path), target) if drafter.path else fresh_head(drafter, target, FRESH_SEED)


def no_head(engine: str, drafter: DrafterSettings) -> str:
    """Why an engine takes none."""
    return (
        f"engine {engine} has no drafting head, as drafter={drafter.__struct_config__.tag}; use drafter=eagle or eagle3"
    )


def build_chooser(drafter: DrafterSettings, learned: Sequence[Range] = ()) -> Chooser:
    """`learned` by a bandit before this one."""
    if isinstance(drafter, NoDrafter):
        return Always(PLAIN)
    return Bandit(drafter, 0, learned) if drafter.adaptive.on else Always(drafter.strategy)
