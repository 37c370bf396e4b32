"""The staleness controller: figures of a step in, how far ahead generation may run out. Pure: no files, no clock.

The settings it can choose from are one ladder, from the most on-policy to the loosest. With K = `max_staleness`:

    effective_staleness   0   1  ...  K   K  ...  K
    publish_every         1   1  ...  1   2  ...  min(publish_every_max, K)

Room to run ahead comes first, because it is what keeps the trainer from waiting; rarer publications only save the cost
of a weight update. A rung never publishes more rarely than its bound allows, so training cannot outrun the published
version. The run starts at (K, 1), which is the fixed bound.

One rule moves it: when the median of the last `window` steps leaves the band, go one rung down or up. The median,
because one token with a ratio out of all proportion can bring a single step's ESS near 0. Groups admitted before a move
are trained up to `effective_staleness` steps after it, and a wider bound takes as long to be used, so as many steps are
left out before the next window begins; otherwise one cause would move it several times.
"""

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import NamedTuple

from asyncrl.config.staleness import Band, StalenessControl


class Decision(NamedTuple):
    """What holds from now on."""

    effective_staleness: int
    """Groups are admitted only for steps this many versions ahead; at most `max_staleness`."""
    publish_every: int
    """Optimizer steps between two publications."""


class StalenessController:
    """`observe` after each optimizer step. Deterministic in the figures it observes."""

    def __init__(self, settings: StalenessControl, max_staleness: int) -> None:
        self._band = settings.band
        self._ladder = _ladder(self._band, max_staleness)
        self._rung = max_staleness if self._band else 0
        self._recent: deque[float] = deque(maxlen=self._band.window if self._band else 1)
        self._unsettled = 0

    @property
    def decision(self) -> Decision:
        return self._ladder[self._rung]

    def observe(self, figures: Mapping[str, float]) -> Decision:
        """Take in the figures of a step; what they say holds from the next admission and publication on. A step of
        which no token was measured, because no sample had an advantage, says nothing."""
        if self._band is None:
            return self.decision
        if self._unsettled:
            self._unsettled -= 1
            return self.decision
        if figures.get("measured_tokens") == 0:
            return self.decision
        self._recent.append(_signal(self._band, figures))
        if len(self._recent) == self._band.window:
            self._move(_direction(self._band, median(self._recent)))
        return self.decision

    def _move(self, direction: int) -> None:
        rung = min(max(self._rung + direction, 0), len(self._ladder) - 1)
        if rung != self._rung:
            self._unsettled = max(self._ladder[r].effective_staleness for r in (rung, self._rung))
            self._recent.clear()
            self._rung = rung


def _ladder(band: Band | None, max_staleness: int) -> tuple[Decision, ...]:
    if band is None:
        return (Decision(max_staleness, 1),)
    rarest = min(band.publish_every_max, max_staleness)
    return (
        *(Decision(bound, 1) for bound in range(max_staleness + 1)),
        *(Decision(max_staleness, every) for every in range(2, rarest + 1)),
    )


def _signal(band: Band, figures: Mapping[str, float]) -> float:
    """The figure that the band is about. Not finite means ratios past all bounds, and counts as the worst."""
    value = figures[band.figure]
    return value if isfinite(value) else band.worst


def _direction(band: Band, value: float) -> int:
    """-1 to tighten, +1 to loosen, 0 inside the band."""
    above, below = value > band.high, value < band.low
    return above - below if band.worst < band.low else below - above
