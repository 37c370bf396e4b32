"""How many engines a run should have: shares of waiting in, the wanted number out. Pure: no Ray, no clock of its own.

Who waits for whom says which side is too small. Let w be the share of time in which the trainer waited for groups,
and r the share of the engines' rows that were empty because no ticket was given. n engines that are busy 1 - r of the
time feed a trainer that is busy 1 - w of it, so both would be busy all the time with

    balance = n * (1 - r) / (1 - w)

engines. The median of w - r over a window decides whether to move at all: above `grow_above` or below
`-shrink_above`, and between them lies the dead band. A move goes to the balance, rounded up, at most to the double or
the half. Rounding up is what keeps it from swinging: after it the pool has room to spare of less than one engine, and
a pool is made smaller only if the balance fits into fewer. If both sides wait, for a long tail or for a weight
update, w - r is small, and the pool stays: another engine would wait as well. Each move that takes the one before it
back doubles the cool-down, up to 16 times, until one goes on in the same direction: near a balance shares are noisy.

Requests that queue up inside the engines are short of KV cache, not of time. They count as a reason to grow at half
the threshold, and forbid to shrink.

    steady --median leaves the band--> resizing --size reached, then `cooldown_s`--> steady
      |
      +-- `refused`: the cluster has no more; stay, and ask again much later

`WaitMeter` measures w and r: two levels, integrated over a clock that is passed in.
"""

from collections import deque
from math import ceil
from statistics import median
from typing import NamedTuple

from asyncrl.config.fleet import Elastic

REVERSALS = 4
"""Doublings of the cool-down, at most."""
ROUNDING = 1e-9
"""What a balance may be above a whole number and still be it."""


class Measured(NamedTuple):
    """What was seen in one interval, each share between 0 and 1."""

    trainer_wait: float
    rollout_wait: float
    queued: float = 0.0
    """Requests that wait in engines, per running one."""


class Resize(NamedTuple):
    """A decision."""

    wanted: int
    reason: str


class ElasticPolicy:
    """`observe` once per interval; times are seconds of any one clock. Deterministic in what it observes."""

    def __init__(self, settings: Elastic, replicas: int) -> None:
        """The run begins with `replicas` engines."""
        self._settings = settings
        self.wanted = min(max(replicas, settings.min), settings.max)
        self._recent: deque[Measured] = deque(maxlen=settings.window)
        self._steady_since: float | None = None
        """When the pool reached the wanted size; None while it is resizing."""
        self._ceiling, self._ceiling_until = settings.max, 0.0
        self._last_move = self._reversals = 0

    def observe(self, now: float, size: int, measured: Measured) -> Resize | None:
        """What was measured with `size` engines that serve. A figure from before the last change says nothing."""
        if size != self.wanted:
            self._steady_since = None
            self._recent.clear()
            return None
        if self._steady_since is None:
            self._steady_since = now
            return None  # part of the interval was spent at another size
        self._recent.append(measured)
        cooldown_s = self._settings.cooldown_s * 2**self._reversals
        if len(self._recent) < self._settings.window or now - self._steady_since < cooldown_s:
            return None
        return self._judge(now, size)

    def refused(self, now: float, size: int) -> None:
        """The cluster did not bring what was wanted: stay with `size`, and ask for more only after `join_timeout_s`."""
        self._move(max(size, self._settings.min))
        self._ceiling, self._ceiling_until = self.wanted, now + self._settings.join_timeout_s

    def _judge(self, now: float, size: int) -> Resize | None:
        trainer, rollout, queued = (median(column) for column in zip(*self._recent, strict=True))
        queue = queued > self._settings.queue_above
        balance = ceil(size * (1 - rollout) / max(1 - trainer, ROUNDING) - ROUNDING)
        seen = f"the trainer waited {trainer:.0%} of the time, engines {rollout:.0%}"
        if trainer - rollout > self._settings.grow_above * (0.5 if queue else 1.0):
            wanted = min(max(balance, size + 1), 2 * size, self._most(now))
        elif rollout - trainer > self._settings.shrink_above and not queue:
            wanted = max(min(balance, size), ceil(size / 2), min(self._settings.min, size))
        else:
            return None
        if wanted == size:
            return None
        back = (wanted - size) * self._last_move < 0
        self._reversals = min(self._reversals + 1, REVERSALS) if back else 0
        self._last_move = wanted - size
        self._move(wanted)
        return Resize(wanted, f"{seen}; {queued:.2g} requests queued for a running one" if queue else seen)

    def _most(self, now: float) -> int:
        return self._settings.max if now >= self._ceiling_until else self._ceiling

    def _move(self, wanted: int) -> None:
        self.wanted = wanted
        self._steady_since = None
        self._recent.clear()


class WaitMeter:
    """Call it at every change; `read` gives the shares of time since it was last called."""

    def __init__(self, now: float) -> None:
        self._since = self._seen = now
        self._waits, self._empty = False, 0.0
        self._trainer_s = self._rollout_s = 0.0

    def trainer(self, now: float, *, waits: bool) -> None:
        """Whether the trainer waits for groups from now on."""
        self._advance(now)
        self._waits = waits

    def rollout(self, now: float, empty: float) -> None:
        """The share of the engines' rows, 0 to 1, that are empty from now on because no ticket is given."""
        self._advance(now)
        self._empty = empty

    def read(self, now: float, queued: float = 0.0) -> Measured:
        """`queued` requests wait in the engines per running one."""
        self._advance(now)
        seconds = now - self._since
        found = (
            Measured(self._trainer_s / seconds, self._rollout_s / seconds, queued) if seconds > 0 else Measured(0, 0)
        )
        self._since, self._trainer_s, self._rollout_s = now, 0.0, 0.0
        return found

    def _advance(self, now: float) -> None:
        passed, self._seen = max(0.0, now - self._seen), max(now, self._seen)
        self._trainer_s += passed * self._waits
        self._rollout_s += passed * self._empty
