"""Trainer and engines of one machine: each takes longer while the other is at work.

Between two events the trainer's pace does not change, so what is left of its work is known when an engine begins or
ends, and its end is computed again.
"""

from asyncrl.simulation.clock import Clock, Process, Signal
from asyncrl.simulation.profile import Sharing
from asyncrl.simulation.rollouts import Rollouts


class SharedMachine:
    def __init__(self, sharing: Sharing, clock: Clock, rollouts: Rollouts) -> None:
        self._sharing, self._clock, self._rollouts = sharing, clock, rollouts
        self._over = Signal()
        self._left = 0.0
        """Seconds of the trainer's work, as if it were alone."""
        self._stretch = 1.0
        self._since = 0.0
        self._events = 0
        if sharing.trainer:
            rollouts.watch_busy(self._repace)

    def compute(self, seconds: float) -> Process:
        """The trainer works; `seconds` are what it takes alone."""
        if not (self._sharing.trainer or self._sharing.engine):
            yield seconds
            return
        self._left, self._since = seconds, self._clock.now
        self._schedule()
        self._rollouts.slow(1 + self._sharing.engine)
        while self._left:
            yield self._over
        self._rollouts.slow(1.0)

    def _repace(self) -> None:
        """Another number of engines is at work."""
        if self._left:
            now = self._clock.now
            self._left = max(0.0, self._left - (now - self._since) / self._stretch)
            self._since = now
            self._schedule()

    def _schedule(self) -> None:
        self._stretch = 1 + self._sharing.trainer * self._rollouts.busy
        self._events += 1
        self._clock.at(self._clock.now + self._left * self._stretch, self._end, self._events)

    def _end(self, event: int) -> None:
        if event == self._events:  # else the pace has changed since
            self._left = 0.0
            self._clock.notify(self._over)
