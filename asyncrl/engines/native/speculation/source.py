"""What both native engines need to speculate: where drafts come from, who chooses the strategy, and what is counted.

`Source`, `Chooser` and `Tally` are the parts; the functions at the end build them from a drafter's settings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from asyncrl.config.drafter import PLAIN, DrafterSettings, HeadDrafter, Strategy
from asyncrl.drafting.bandit import Bandit, Range
from asyncrl.drafting.checkpoint import fresh_head, load_head
from asyncrl.drafting.heads import Head
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.sampling import Column
from asyncrl.models.config import ModelConfig
from asyncrl.types import SpeculationArm

if TYPE_CHECKING:
    from asyncrl.engines.native.cpu.cache import Layout

Taps = tuple[int, ...]
FRESH_SEED = 0
"""All replicas begin with the same head."""


class Seen(NamedTuple):
    """What a step has computed, after its tokens were recorded: each row's accepted columns lie first, in order."""

    layout: "Layout"
    """Of a chain, whatever was drafted."""
    start_N: Column
    """Computed tokens of each row before the step."""
    last_N: Column
    """The column of each row whose next token is its newest."""
    ready_N: Column
    """Rows that decode; the others are still prefilling."""
    read_T_R: Tensor | None
    """What the source asked for, of the flat tokens."""


class Source(Protocol):
    """Where drafts come from."""

    taps: Taps | None
    """What it reads of the target: places in the residual stream, () for the final hidden states, None for nothing."""

    def draft(self, slots: BatchTable, strategy: Strategy, seen: Seen) -> None:
        """Put drafts for the next step into `slots.drafts`."""
        ...


class Chooser(Protocol):
    """Which strategy to draft with, as `asyncrl.drafting.bandit.Bandit` finds it."""

    def choose(self, batch: int) -> Strategy: ...

    def record(self, batch: int, strategy: Strategy, tokens: int, seconds: float) -> None: ...

    def report(self) -> tuple[SpeculationArm, ...]: ...


class Always:
    """One strategy, whatever is measured."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def choose(self, batch: int) -> Strategy:
        return self._strategy

    def record(self, batch: int, strategy: Strategy, tokens: int, seconds: float) -> None: ...

    def report(self) -> tuple[SpeculationArm, ...]:
        return ()


class Forceable:
    """Another chooser, unless a strategy is forced; what is measured reaches it either way."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self.forced: Strategy | None = None
        self.record, self.report = chooser.record, chooser.report

    def choose(self, batch: int) -> Strategy:
        return self.forced or self._chooser.choose(batch)

    def learned(self) -> list[Range]:
        return self._chooser.state() if isinstance(self._chooser, Bandit) else []


class Tally:
    """Sums since the start of the engine."""

    def __init__(self) -> None:
        self.drafts = self.drafted_tokens = 0
        self.accepted: list[int] = []
        """Accepted tokens by their position in the draft."""

    def add(self, drafted_N: Column, accepted_N: Column) -> None:
        self.drafts += int((drafted_N > 0).sum())
        self.drafted_tokens += int(drafted_N.sum())
        rows_by_accepted: list[int] = np.bincount(accepted_N).tolist()
        self.accepted += [0] * (len(rows_by_accepted) - 1 - len(self.accepted))
        for accepted, rows in enumerate(rows_by_accepted):
            for position in range(accepted):
                self.accepted[position] += rows


def spare_slots(drafter: DrafterSettings) -> int:
    """How many tokens a row may compute behind its end."""
    return max(max(strategy.nodes, strategy.depth * strategy.top_k) for strategy in drafter.possible_strategies)


def build_head(drafter: HeadDrafter, target: ModelConfig) -> Head:
    return load_head(Path(drafter.path), target) if drafter.path else fresh_head(drafter, target, FRESH_SEED)


def no_head(engine: str, drafter: DrafterSettings) -> str:
    """Why an engine takes none."""
    return f"engine {engine} has no drafting head, as drafter={drafter.kind}; use drafter=eagle or eagle3"


def build_chooser(drafter: DrafterSettings, learned: Sequence[Range] = ()) -> Chooser:
    """`learned` by a bandit before this one."""
    drafting = drafter.drafting
    if drafting is None:
        return Always(PLAIN)
    return Bandit(drafting, 0, learned) if drafting.adaptive.on else Always(drafting.strategy)
