"""Every tracker by its name, and all the trackers of a run as one.

A new one is a file with a function of a `Session` that gives a `Tracker`, a line here, and its name with a line in
`asyncrl.config.trackers`.
"""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from asyncrl.config.trackers import TrackerName
from asyncrl.observe.trackers.async_tracker import AsyncTracker, Call
from asyncrl.observe.trackers.base import Session, Tracker, numbers, of_step

CLOSE_S = 15.0
"""For all trackers together, at the end of a run."""
Opener = Callable[[], Tracker]
TRACKERS: dict[TrackerName, str] = {
    "tensorboard": "asyncrl.observe.trackers.tensorboard:open",
    "wandb": "asyncrl.observe.trackers.wandb:open",
    "mlflow": "asyncrl.observe.trackers.mlflow:open",
    "trackio": "asyncrl.observe.trackers.trackio:open",
}
"""As `module:function`. Those that need Ray are named by `pipelines.recording.recorder`: the core knows no Ray."""


def opener(location: str, session: Session) -> Opener:
    """Its packages are imported when that is called."""
    module, name = location.split(":")
    return lambda: getattr(import_module(module), name)(session)


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
