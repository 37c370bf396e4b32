"""All that a report is made of, read once from a run's directory. What is missing there is empty here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import duckdb
import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.observe.diagnosis.report import TEXT as STALL
from asyncrl.observe.query.tables import open_run
from asyncrl.system import processes
from asyncrl.system.run_directory import RunDirectory, read_events

# Whether the process that drives a run is alive, as its directory tells and without touching it.


def driver_of(roster: Path) -> tuple[int, bool]:
    """Its process id, and whether it runs on this machine. `roster` is written when the actors are placed."""
    driver = int(msgspec.json.decode(roster.read_bytes())["driver"])
    return driver, processes.is_still(driver, roster.stat().st_mtime)


Row = dict[str, Any]
Column = npt.NDArray[Any]
COLUMNS = (
    "group_id", "sample", "engine", "started", "finished", "reward", "answer_tokens", "fate", "step", "staleness",
    "drop_reason", "finish",
)  # fmt: skip
"""Of the trajectories, held in memory: all but texts and tokens."""


@dataclass(frozen=True)
class Recorded:
    directory: RunDirectory
    connection: duckdb.DuckDBPyConnection
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, Any]
    events: Sequence[Row]
    rows: Sequence[Row]
    """Of the metrics, one for each step."""
    completions: Mapping[str, Column]
    """Columns of the trajectories, in the order in which they were finished."""
    status: str
    """`ok`, `failed`, `interrupted`, `running`, or `killed` for a run that ended without a summary."""
    trouble: str
    """What ended it, if something did."""

    @property
    def attempts(self) -> int:
        return sum(event["kind"] == "fleet_started" for event in self.events)

    def setting(self, path: str, default: Any) -> Any:
        """A value of the config by its dotted name; configs of other releases may lack it."""
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return default if found is None else found


def read(path: Path) -> Recorded:
    """ConfigError where there is no run."""
    directory = RunDirectory.open(path)
    connection = open_run(path)
    text = directory.config.read_text()
    summary: Row = directory.read_summary() or {}
    events = sorted(read_events(directory.events), key=lambda event: event["time"] + (event.get("seconds") or 0.0))
    status = _status(directory, summary, events)
    return Recorded(
        directory=directory,
        connection=connection,
        config=msgspec.yaml.decode(text),
        config_text=text,
        summary=summary if status not in ("running", "killed") else {},
        events=events,
        rows=connection.sql("FROM metrics ORDER BY step").to_arrow_table().to_pylist(),
        completions=_completions(connection),
        status=status,
        trouble=_trouble(directory, status, summary),
    )


def _completions(connection: duckdb.DuckDBPyConnection) -> Mapping[str, Column]:
    found = connection.view("trajectories").project(", ".join(COLUMNS)).order("finished")
    return cast(Mapping[str, Column], found.fetchnumpy())


def _status(directory: RunDirectory, summary: Mapping[str, Any], events: Sequence[Row]) -> str:
    """A run that was resumed writes events again, while the summary of its last attempt still lies there."""
    last = max((event["time"] for event in events), default=0.0)
    if summary and directory.summary.stat().st_mtime >= last:
        return str(summary.get("status", "ok"))
    placed = directory.actors.exists()
    return "running" if not events or (placed and driver_of(directory.actors)[1]) else "killed"


def _trouble(directory: RunDirectory, status: str, summary: Mapping[str, Any]) -> str:
    stall = directory.path / STALL
    if status in ("ok", "running"):
        return ""
    if stall.exists():
        return stall.read_text(errors="replace").partition("\n\n")[0]
    if status == "killed":
        return (
            "The run ended without a summary: it was killed, or its machine stopped. Continue it with `asyncrl resume`."
        )
    return str(summary.get("error") or "")


def differences(rows: Sequence[Row], name: str) -> npt.NDArray[np.float64]:
    """How much a counter grew in each step; one that went back was started again at 0."""
    values = np.array([row.get(name) or 0.0 for row in rows], np.float64)
    grown = np.diff(values, prepend=0.0)
    return np.where(grown < 0, values, grown)
