"""Where drafts come from."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from asyncrl.drafting.bandit import Bandit, Range
from asyncrl.drafting.settings import Strategy
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.slots import SlotTable
from asyncrl.types import SpeculationArm

if TYPE_CHECKING:
    from asyncrl.engines.native.cache import Layout

Taps = tuple[int, ...]


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
    taps: Taps | None
    """What it reads of the target: places in the residual stream, () for the final hidden states, None for nothing."""

    def draft(self, slots: SlotTable, strategy: Strategy, seen: Seen) -> None:
        """Put drafts for the next step into `slots.drafts`."""
        ...


class Chooser(Protocol):
    """As `asyncrl.drafting.bandit.Bandit` is."""

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
