"""trackio: a local database, which `trackio show` draws. TRACKIO_DIR says where."""

from typing import Any
from uuid import uuid4

from asyncrl.observe.trackers.base import Figures, Session, Tracker, named
from asyncrl.system.optional import require


def open(session: Session) -> Tracker:
    trackio: Any = require("trackio", extra="trackio")
    # It knows a run by its name, and ours may be used again in another directory.
    name = session.identity("trackio", lambda: f"{session.name}-{uuid4().hex[:6]}")
    run = trackio.init(
        session.project,
        name,
        config=session.config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return Trackio(run)


class Trackio:
    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, step: int, figures: Figures) -> None:
        self._run.log(named("step", figures), step=step)

    def evaluation(self, step: int, scores: Figures) -> None:
        self._run.log(named("evaluation", scores), step=step)

    def note(self, step: int, text: str) -> None:
        self._run.alert(f"step {step}", text)

    def close(self) -> None:
        self._run.finish()
