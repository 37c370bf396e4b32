"""Costs from spans of time: least squares that knows what it cannot tell."""

from collections.abc import Callable, Iterable
from math import log

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHORTEST = 1e-9
"""Seconds, against divisions by nothing."""
SURE = 3.0
"""Standard errors that a cost must be above nothing, to count as seen."""
APART = 0.1
"""Spread of the company that spans had, from which on they tell what it costs."""
MOST_SLOWED = 4.0
TRIED = 201
"""Slowdowns up to it that are looked at."""
PASSES = 2


class Company:
    """How many others were at work, at every moment."""

    def __init__(self, others: Iterable[Iterable[tuple[float, float]]]) -> None:
        """When each of them had something to do; what one does at the same time counts once."""
        begin, end = (np.concatenate(times) for times in zip(*map(_merged, others), strict=True))
        self._times = np.unique(np.concatenate([begin, end]))
        self._working = level(self._times, begin, end)

    def alone(self, begin: Floats, end: Floats, slowdown: float) -> Floats:
        """What each span would have taken alone, if every other one at work makes it longer by `slowdown`."""
        return self._during(begin, end, 1 / (1 + slowdown * self._working))

    def share(self, begin: Floats, end: Floats) -> Floats:
        """Of each span in which at least one other was at work."""
        return 1 - self._during(begin, end, (self._working == 0).astype(np.float64)) / np.maximum(end - begin, SHORTEST)

    def _during(self, begin: Floats, end: Floats, pace: Floats) -> Floats:
        """What comes together in each span at this pace; before and after everybody it is 1."""
        first, last = self._times[0], self._times[-1]
        passed = np.concatenate([[0.0], np.cumsum(np.diff(self._times) * pace)])

        def until(time: Floats) -> Floats:
            outside = np.minimum(time - first, 0.0) + np.maximum(time - last, 0.0)
            return np.interp(time, self._times, passed) + outside

        return until(end) - until(begin)


def _merged(spans: Iterable[tuple[float, float]]) -> tuple[Floats, Floats]:
    begin, end = np.array(sorted(spans), np.float64).reshape(-1, 2).T
    end = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], end[:-1])
    return begin, end


def level(times: Floats, begin: Floats, end: Floats) -> Floats:
    """How many spans are open after each moment but the last."""
    opened = np.searchsorted(np.sort(begin), times[:-1], side="right")
    return (opened - np.searchsorted(np.sort(end), times[:-1], side="right")).astype(np.float64)


def fit(columns: Floats, seconds: Floats) -> Floats:
    """What one of each column takes, never less than nothing, if row by row they take `seconds` together.

    Their proportion is that of the least squares of the error relative to what is expected, so that short spans count
    as much as long ones; their size is such that the sum is right. What cannot be told from nothing is nothing: a run
    that has more of it would be charged for noise.
    """
    scaled, wanted = _relative(columns, seconds)
    kept = list(range(columns.shape[1]))
    while True:
        costs, errors, _ = _least(scaled[:, kept], wanted)
        doubtful = int(np.argmin(costs / np.maximum(errors, SHORTEST * np.abs(costs).max())))
        if len(kept) == 1 or costs[doubtful] > SURE * errors[doubtful]:
            break
        del kept[doubtful]
    found = np.zeros(columns.shape[1])
    found[kept] = costs
    return found * seconds.sum() / max(float((columns @ found).sum()), SHORTEST)


def slowdown(columns: Floats, alone: Callable[[float], Floats], company: Floats) -> float | None:
    """The one with which the columns explain best what spans would have taken `alone`; None where their company was
    always about the same, which tells nothing."""
    if len(company) <= columns.shape[1] + 1 or company.std() < APART:
        return None
    left = {f: _least(*_relative(columns, alone(f)))[2] for f in np.linspace(0.0, MOST_SLOWED, TRIED).tolist()}
    best = min(left, key=lambda f: left[f])
    return best if surely(len(company), left[0.0], left[best]) else 0.0


def surely(rows: int, before: float, after: float) -> bool:
    """Whether squares fall by more than noise makes them fall: the likelihood ratio of normal errors."""
    return rows * log(max(before, SHORTEST) / max(after, SHORTEST)) > SURE**2


def _relative(columns: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Both, divided by the seconds that a first fit expects of each row."""
    expected = (columns / np.maximum(columns.mean(axis=0), SHORTEST)).sum(axis=1)
    for _ in range(PASSES):
        costs = _least(*_divided(columns, seconds, expected))[0]
        expected = columns @ np.maximum(costs, 0.0)
    return _divided(columns, seconds, expected)


def _divided(columns: Floats, seconds: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Rows that nothing is expected of count as the mean one, lest they outweigh all others."""
    weight = 1 / np.where(expected > SHORTEST, expected, max(float(expected.mean()), SHORTEST))
    return columns * weight[:, None], seconds * weight


def _least(columns: Floats, wanted: Floats) -> tuple[Floats, Floats, float]:
    """Coefficients, their standard errors, and the squares that are left."""
    costs = np.asarray(np.linalg.lstsq(columns, wanted, rcond=None)[0], np.float64)
    left = float(((columns @ costs - wanted) ** 2).sum())
    variance = left / max(1, len(columns) - columns.shape[1])
    return costs, np.sqrt(variance * np.diag(np.linalg.pinv(columns.T @ columns))), left
