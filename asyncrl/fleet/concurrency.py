"""The traffic of one engine: how many requests it has in flight, and how long finished completions wait to be sent.

The limit in flight is set by additive increase, multiplicative decrease, as in congestion control. Pure: the engine's
load in, a limit out. Requests that an engine cannot run lie in its queue, where no other engine can take them, or
worse, are preempted and computed again; too few leave the batch small. So the limit grows while it is used up and
nothing queues, is cut when something does, and stays where a raise did not bring more tokens per second: from there on
larger batches only make each completion slower.
"""

from typing import NamedTuple

from asyncrl.config.fleet import Concurrency

GATHER_SECONDS = 0.05
"""Least time that finished completions wait for others, to go to the buffer in one call."""
LONGEST_SECONDS = 1.0
CALLS_PER_SECOND = 100
"""That the engines of a run make together: one buffer serves them all, and a call costs it more than what is in it."""


class Pressure(NamedTuple):
    """What an engine reports of its load; counters are since its start."""

    running: int
    waiting: int
    generated_tokens: int
    preempted: int = 0
    """Requests that were thrown out of the KV cache and are computed again."""
    recomputed: int = 0
    """Tokens computed again for weight updates, which preempt as well; that is no lack of memory."""


class _Raise(NamedTuple):
    """The last raise, and what the engine gave before it."""

    limit: int
    rate: float


class InFlightLimit:
    """Of one engine. `observe` from time to time; times are seconds of any one clock."""

    def __init__(self, settings: Concurrency) -> None:
        self._settings = settings
        self.limit = max(settings.start, settings.min)
        self._before: tuple[float, Pressure] | None = None
        self._raised: _Raise | None = None

    def observe(self, now: float, given: int, pressure: Pressure) -> int:
        """The limit from now on; `given` requests are under way at the engine as its giver counts them."""
        before, self._before = self._before, (now, pressure)
        if before is None or now <= before[0] or pressure.generated_tokens < before[1].generated_tokens:
            return self.limit  # the first look, or the engine was started again
        rate = (pressure.generated_tokens - before[1].generated_tokens) / (now - before[0])
        if _is_full(before[1], pressure):
            self._raised = None
            self.limit = max(self._settings.min, int(min(self.limit, given) * self._settings.lower_to))
        elif given >= self.limit and self._pays(rate):
            self._raised = _Raise(self.limit, rate)
            self.limit += self._settings.raise_by
        return self.limit

    def _pays(self, rate: float) -> bool:
        """Whether the last raise brought more tokens per second. If not it is taken back, until the engine gives more
        than it ever did at that limit: its completions may have become another kind."""
        if self._raised is None:
            return True
        if rate > self._raised.rate * (1 + self._settings.worth):
            return True
        self.limit = min(self.limit, self._raised.limit)
        self._raised = self._raised._replace(rate=max(rate, self._raised.rate))
        return False


def _is_full(before: Pressure, now: Pressure) -> bool:
    """What waits at one look only may have come in that very moment."""
    thrown_out = now.preempted > before.preempted and now.recomputed == before.recomputed
    return thrown_out or (before.waiting > 0 and now.waiting > 0)


def gather_seconds(engines: int) -> float:
    """With many engines the completions of each wait longer, so that calls to the buffer stay few."""
    return min(max(GATHER_SECONDS, engines / CALLS_PER_SECOND), LONGEST_SECONDS)
