"""From a drafter's settings to what speculation needs."""

from pathlib import Path

from asyncrl.drafting.bandit import PLAIN, Bandit, strategies
from asyncrl.drafting.checkpoint import fresh_head, load_head
from asyncrl.drafting.settings import DrafterSettings, Drafting, Eagle3Drafter, EagleDrafter, NgramDrafter, NoDrafter
from asyncrl.engines.native.decoding import Policy
from asyncrl.engines.native.speculation.heads import HeadSource
from asyncrl.engines.native.speculation.ngram import Ngram
from asyncrl.engines.native.speculation.source import Always, Chooser
from asyncrl.engines.settings import NativeEngine as Settings

FRESH_SEED = 0
"""All replicas begin with the same head."""


def spare_slots(drafter: DrafterSettings) -> int:
    """How many tokens a row may compute behind its end."""
    if isinstance(drafter, NoDrafter):
        return 0
    possible = strategies(drafter) if drafter.adaptive.on else [drafter.strategy]
    return max(max(strategy.nodes, strategy.depth * strategy.top_k) for strategy in possible)


def build_source(drafter: Drafting, policy: Policy, settings: Settings) -> Ngram | HeadSource:
    match drafter:
        case NgramDrafter():
            return Ngram(drafter)
        case EagleDrafter() | Eagle3Drafter():
            if drafter.path:
                head = load_head(Path(drafter.path), policy.config)
            else:
                head = fresh_head(drafter, policy.config, FRESH_SEED)
            return HeadSource(head, policy, settings.max_batch, settings.max_length + spare_slots(drafter))
        case _:
            raise AssertionError(f"no source for {drafter!r}")


def build_chooser(drafter: DrafterSettings) -> Chooser:
    if isinstance(drafter, NoDrafter):
        return Always(PLAIN)
    return Bandit(drafter, seed=0) if drafter.adaptive.on else Always(drafter.strategy)
