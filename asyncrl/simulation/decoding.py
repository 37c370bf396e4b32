"""The pace of a recorded run's engines, found in their completions alone.

When each completion began and ended says how many rows b the batch had at every moment, and the trainer's spans say
when it was at work (a = 1) or not (a = 0). If a step takes (s + r * b) * (1 + f * a) seconds, a completion has gained

    L = the integral of dt / ((s + r * b(t)) * (1 + f * a(t)))

tokens when it is finished: thousands of equations for three unknowns. They are chosen so that the relative errors of L
are smallest, and their size so that the sum of all tokens is right.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.simulation.fitting import APART, MOST_SLOWED, SHORTEST, Floats, level, surely
from asyncrl.simulation.profile import Affine
from asyncrl.simulation.recordings import Sample, by_engine

POINTS, ROUNDS, CLOSER = 9, 4, 0.25
"""Of a search: so many values of each unknown, so often, each time in a smaller part around the best."""


class _Course(NamedTuple):
    """One engine between each two moments in which anything changed."""

    seconds: Floats
    rows: Floats
    """Completions in the batch."""
    trains: Floats
    """1 where the trainer was at work, else 0."""
    begin: NDArray[np.intp]
    end: NDArray[np.intp]
    """The moments in which each completion that counts got its row and was finished."""
    tokens: Floats

    def during(self, rate: Floats) -> Floats:
        """What comes together while each completion is in the batch."""
        passed = np.concatenate([[0.0], np.cumsum(self.seconds * rate)])
        return passed[self.end] - passed[self.begin]


class Decoding:
    """All engines of a run."""

    def __init__(
        self,
        samples: Sequence[Sample],
        max_batch: int,
        trained: Iterable[tuple[float, float]] = (),
        since: float = -inf,
    ) -> None:
        """`trained`: when the trainer was at work. Completions that got their row before `since` do not count."""
        self._max_batch = max_batch
        spans = np.array(sorted(trained), np.float64).reshape(-1, 2)
        self._courses = [_course(own, max_batch, spans, since) for own in by_engine(samples).values()]
        self._tokens = np.concatenate([course.tokens for course in self._courses])

    def slowdown(self) -> float | None:
        """f; None where completions had about the same share of the trainer's company, which tells nothing."""
        together = np.concatenate([course.during(course.trains) for course in self._courses])
        seconds = np.concatenate([course.during(np.ones_like(course.trains)) for course in self._courses])
        if len(seconds) < POINTS or (together / np.maximum(seconds, SHORTEST)).std() < APART:
            return None
        slowed, alone = self._search(MOST_SLOWED), self._search(0.0)
        return slowed[2] if surely(len(seconds), alone[0], slowed[0]) else 0.0

    def step(self, slowdown: float) -> Affine:
        """What a step takes without the trainer's company, which makes it 1 + `slowdown` times as long. Where about as
        many completions ran all the time, nothing tells what a row costs, and steps count as equally long."""
        error, share, _ = self._search(slowdown, slowdown)
        if not surely(len(self._tokens), self._error(0.0, slowdown), error):
            share = 0.0
        seconds = float(self._gained(share, slowdown).sum()) / max(float(self._tokens.sum()), SHORTEST)
        return Affine(seconds=(1 - share) * seconds, per_row=share * seconds / self._max_batch)

    def _search(self, most: float, least: float = 0.0) -> tuple[float, float, float]:
        """The smallest error, with the rows' share of a full step and the slowdown that have it."""
        shares, slowdowns, best = (0.0, 1.0), (least, most), (inf, 0.0, least)
        for _ in range(ROUNDS):
            tried = ((x, f) for x in np.linspace(*shares, POINTS) for f in sorted({*np.linspace(*slowdowns, POINTS)}))
            best = min(best, *((self._error(x, f), float(x), float(f)) for x, f in tried))
            shares = _around(best[1], shares, 0.0, 1.0)
            slowdowns = _around(best[2], slowdowns, least, most)
        return best

    def _error(self, share: float, slowdown: float) -> float:
        """Squares of the relative errors, at the size that makes them smallest."""
        ratio = self._gained(share, slowdown) / self._tokens
        return len(ratio) - float(ratio.sum()) ** 2 / max(float(ratio @ ratio), SHORTEST)

    def _gained(self, share: float, slowdown: float) -> Floats:
        """Tokens of each completion, if a full step takes a second alone."""
        return np.concatenate(
            [
                course.during(
                    1 / ((1 - share + share * course.rows / self._max_batch) * (1 + slowdown * course.trains))
                )
                for course in self._courses
            ]
        )


def _around(best: float, bounds: tuple[float, float], least: float, most: float) -> tuple[float, float]:
    reach = (bounds[1] - bounds[0]) * CLOSER / 2
    return max(least, best - reach), min(most, best + reach)


def _course(samples: Sequence[Sample], max_batch: int, trained: Floats, since: float) -> _Course:
    entered = _entered(samples, max_batch)
    finished = np.array([sample.finished for sample in samples])
    times = np.unique(np.concatenate([entered, finished, trained.ravel()]))
    rows = level(times, entered, finished)
    tokens = np.array([float(sample.tokens) for sample in samples])
    counts = (entered >= since) & (tokens > 0)
    return _Course(
        seconds=np.diff(times),
        rows=np.clip(rows, 1, max_batch),
        trains=np.minimum(1.0, level(times, *trained.T)),
        begin=np.searchsorted(times, entered[counts]),
        end=np.searchsorted(times, finished[counts]),
        tokens=tokens[counts],
    )


def _entered(samples: Sequence[Sample], max_batch: int) -> Floats:
    """When each completion got its row: at once, or when one of a full batch was finished; first come, first served."""
    entered = np.zeros(len(samples))
    running: list[float] = []
    for i in sorted(range(len(samples)), key=lambda i: samples[i].started):
        begin = samples[i].started
        while running and running[0] <= begin:
            heappop(running)
        if len(running) >= max_batch:
            begin = heappop(running)
        entered[i] = min(begin, samples[i].finished)
        heappush(running, samples[i].finished)
    return entered
