"""The host's side of speculation on a GPU: what is drafted with, what became of drafts, and what that took."""

from time import perf_counter
from typing import NamedTuple

import numpy as np

from asyncrl.config.drafter import DrafterSettings
from asyncrl.engines.native.batch_table import BatchTable, Ended
from asyncrl.engines.native.cuda.device_outputs import Flight
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.speculation.ngram import Ngram
from asyncrl.engines.native.speculation.source import Tally
from asyncrl.engines.native.verification import DraftTable, Verdict
from asyncrl.errors import EngineError


def chain_depths(drafter: DrafterSettings) -> list[int]:
    """Of all strategies that may be chosen."""
    if drafter.has_trees:
        raise EngineError("a GPU verifies chains of drafts, no trees; use drafter.top_k=1, or engine.device=cpu")
    return sorted({strategy.depth for strategy in drafter.possible_strategies} - {0})


class Clock:
    """Time between the results of two steps, which is that of drafting for the second and of the second itself."""

    def __init__(self) -> None:
        self._last = 0.0

    def lap(self) -> float:
        """0 after a stop."""
        last, self._last = self._last, perf_counter()
        return self._last - last if last else 0.0

    def stop(self) -> None:
        self._last = 0.0


class Runs(NamedTuple):
    """What rows keep of a step."""

    tokens: int
    ended: Ended
    logprob_sum: float


class Speculation:
    def __init__(self, drafter: DrafterSettings, slots: BatchTable, drafts: DraftTable, tally: Tally) -> None:
        self._slots, self._drafts, self._tally = slots, drafts, tally
        self._ngram = Ngram(drafter.ngram) if drafter.ngram is not None else None
        rows = len(slots.index)
        self._on_device_N_C = -1 - (np.arange(1, 1 + drafts.nodes) * rows + slots.index[:, None])
        """A head's drafts never leave the device: these numbers say where they are."""

    def width(self, depth: int) -> int:
        """Columns of a step that verifies drafts of this depth, if there are any."""
        return 1 + depth if self._drafts.count[: self._slots.count].any() else 1

    def drop(self) -> None:
        """What waits was drawn from a distribution over tokens that a new head numbers differently."""
        self._drafts.clear()

    def record(self, flight: Flight, ready_N: Column, depth: int) -> Runs:
        """Store the result of a step, and say where the drafts are that were made behind it."""
        slots, rows, width = self._slots, self._slots.count, flight.shape.width
        accepted_N = flight.accepted_N[:rows] if width > 1 else np.zeros(rows, np.int64)
        drafted_N = np.where(ready_N, self._drafts.count[:rows], 0)
        path_N_W = np.broadcast_to(np.arange(width), (rows, width))
        verdict = Verdict(flight.token_N_W[:rows], flight.logprob_N_W[:rows], accepted_N, path_N_W)
        kept_N, ended = slots.record_runs(np.where(ready_N, slots.known[:rows], slots.computed[:rows]), verdict)
        self._tally.add(drafted_N, np.minimum(accepted_N, kept_N))
        slots.head_computed[:rows][ready_N] = slots.computed[:rows][ready_N]
        self._hold(depth, ready_N & ~slots.restricted())
        return Runs(int(kept_N.sum()), ended, float(verdict.logprobs_N_W[ready_N, 0].sum()))

    def _hold(self, depth: int, ready_N: Column) -> None:
        if not depth:
            self._drafts.clear()
        elif self._ngram is not None:
            self._ngram.look_up(self._slots, depth, ready_N)
        else:
            self._drafts.hold_chains(self._on_device_N_C[: len(ready_N), :depth], np.where(ready_N, depth, 0))
