"""What a tracker is: somewhere else that a run's figures go, besides its directory, which always has them all."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.rundir import replace

Figures = Mapping[str, float]
"""Numbers by name, as in metrics.parquet; what is nested there has a slash in its name."""


class Tracker(Protocol):
    """Used by one thread of its own. It may block, and raise whatever it likes: the run does not wait for it."""

    def step(self, step: int, figures: Figures) -> None: ...

    def evaluation(self, step: int, scores: Figures) -> None:
        """Held-out scores after `step` steps."""
        ...

    def note(self, step: int, text: str) -> None:
        """Something that happened: an alarm, an engine lost."""
        ...

    def close(self) -> None: ...


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The run that is tracked. A resumed one is the same, and says steps from `first_step` on once more."""

    name: str
    project: str
    directory: Path
    """The run's own; trackers keep their things in `home`."""
    config: dict[str, Any]
    first_step: int = 0

    @property
    def home(self) -> Path:
        home = self.directory / "tracking"
        home.mkdir(exist_ok=True)
        return home

    def identity(self, tracker: str, create: Callable[[], str]) -> str:
        """The run's id with a tracker: the one that is written in its directory, else a new one."""
        path = self.home / f"{tracker}.id"
        if not path.exists():
            replace(path, create().encode())
        return path.read_text()


def named(kind: str, figures: Figures) -> dict[str, float]:
    """As most trackers want it: the part before the slash makes a section of the page."""
    return {f"{kind}/{name}": value for name, value in figures.items()}
