"""All the trackers of a run, as one."""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from asyncrl.observe.trackers.async_tracker import AsyncTracker, Call
from asyncrl.observe.trackers.base import Session, Tracker, numbers, of_step

CLOSE_S = 15.0
"""For all trackers together, at the end of a run."""
Opener = Callable[[], Tracker]


def opener(name: str, session: Session) -> Opener:
    """`asyncrl/tracking/<name>.py` has a function `open`; its package is imported when that is called."""
    return lambda: import_module(f"asyncrl.observe.trackers.{name}").open(session)


class Trackers:
    """Takes what the recorder has written down, and never makes it wait. Without openers it does nothing."""

    def __init__(self, openers: Mapping[str, Opener], say: Callable[[str], None]) -> None:
        self._lanes = [AsyncTracker(name, open, say) for name, open in openers.items()]
        self._step = 0

    def step(self, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        step = self._step = row["step"]
        figures = of_step(row, before)
        self._offer(lambda tracker: tracker.step(step, figures))

    def evaluation(self, steps_done: int, scores: Mapping[str, Any]) -> None:
        figures = numbers(scores)
        self._offer(lambda tracker: tracker.evaluation(steps_done, figures))

    def note(self, text: str) -> None:
        step = self._step
        self._offer(lambda tracker: tracker.note(step, text))

    def _offer(self, call: Call) -> None:
        for lane in self._lanes:
            lane.offer(call)

    def close(self) -> dict[str, int]:
        """By tracker, the records that did not get through."""
        for lane in self._lanes:
            lane.end()
        deadline = time.monotonic() + CLOSE_S
        lost = {lane.name: lane.lost(max(0.0, deadline - time.monotonic())) for lane in self._lanes}
        self._lanes = []
        return {name: count for name, count in lost.items() if count}
