"""What a tracker is: somewhere else that a run's figures go, besides its directory, which always has them all.

`of_step` makes these figures of a row of metrics.parquet: plain numbers, with the rates that people look for first.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from asyncrl.system.run_directory import replace

TIMES = frozenset({"step", "time", "first_work", "first_wave_finished"})
"""Points in time, of which a curve shows nothing."""
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
    say: Callable[[str], None] = print
    """To whoever looks at the terminal."""

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


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number in it; lists and what is not known are left out."""
    return dict(_numbers(values, prefix))


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(cast(Mapping[str, Any], value), f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def of_step(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """`before` is the row of the step before, if there was one."""
    seconds = row["loop_seconds"] - (before["loop_seconds"] if before else 0.0)
    tokens = row["generated_tokens"] - (before["generated_tokens"] if before else 0)
    figures = numbers({name: value for name, value in row.items() if name not in TIMES})
    if seconds > 0:
        figures |= {
            "step_seconds": seconds,
            "samples_per_second": row["samples"] / seconds,
            "generated_tokens_per_second": tokens / seconds,
            "wait_fraction": row["wait_seconds"] / seconds,
        }
    return figures
