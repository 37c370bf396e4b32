"""Who waits for whom, as shares of time. Pure: two levels, integrated over a clock that is passed in."""

from asyncrl.flow.elastic import Measured


class WaitMeter:
    """Told of every change; `read` gives the shares since it was last called."""

    def __init__(self, now: float) -> None:
        self._since = self._seen = now
        self._waits, self._empty = False, 0.0
        self._trainer_s = self._rollout_s = 0.0

    def trainer(self, now: float, *, waits: bool) -> None:
        """Whether the trainer waits for groups from now on."""
        self._advance(now)
        self._waits = waits

    def rollout(self, now: float, empty: float) -> None:
        """The share of the engines' rows, 0 to 1, that are empty from now on because no place is given."""
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
