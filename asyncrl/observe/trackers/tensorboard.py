"""TensorBoard: event files in the run's directory. `tensorboard --logdir runs` shows every run."""

from typing import Any

from asyncrl.observe.trackers.base import Figures, Session, Tracker, named
from asyncrl.system.optional import require


def open(session: Session) -> Tracker:
    require("tensorboard", extra="tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run says some steps again: the ones before are hidden.
    return TensorBoard(SummaryWriter(str(session.home / "tensorboard"), purge_step=session.first_step, flush_secs=10))


class TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def step(self, step: int, figures: Figures) -> None:
        self._add("step", step, figures)

    def evaluation(self, step: int, scores: Figures) -> None:
        self._add("evaluation", step, scores)

    def _add(self, kind: str, step: int, figures: Figures) -> None:
        for name, value in named(kind, figures).items():
            self._writer.add_scalar(name, value, step)

    def note(self, step: int, text: str) -> None:
        self._writer.add_text("notes", text, step)

    def close(self) -> None:
        self._writer.close()
