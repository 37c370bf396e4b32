"""The metrics and events of a run: that every byte of them can be read, and that no step is missing."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.untrusted import read_table
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.audit.evidence import DamageError

BEGIN = b'{"kind":'
"""Of every event."""


class Events(msgspec.Struct):
    """How much of the events was read."""

    lines: int = 0
    torn: int = 0
    """Lines that a kill left unfinished."""


def check_metrics(path: Path, steps: int, summary: Mapping[str, Any] | None, lost: int = 0) -> int:
    """Rows of metrics.parquet, one for each step; DamageError if it cannot be read or lacks a step. Of the first `lost`
    steps there may be none: the file that had them was damaged."""
    try:
        recorded: list[int] = read_table(path).column("step").to_pylist() if path.exists() else []
    except (CorruptSegmentError, KeyError) as error:
        raise DamageError(str(error)) from None
    first = min(recorded[0], lost) if recorded else 0
    for row, step in enumerate(recorded):
        if step != first + row:
            raise DamageError(f"{path.name}: row {row} holds step {step}")
    last = first + len(recorded)
    if last > steps:
        raise DamageError(f"{path.name} has {last} steps, but the journal commits {steps}")
    if summary is not None and summary.get("status") == "ok" and last != summary["steps"]:
        raise DamageError(f"{path.name} has {last} steps, but summary.json counts {summary['steps']}")
    return len(recorded)


def check_events(path: Path) -> Events:
    """DamageError for a line that is neither an event nor the beginning of one."""
    found = Events()
    for number, line in enumerate(_lines(path), 1):
        found.lines += 1
        try:
            event = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if "truncated" not in str(error) and BEGIN not in line[1:]:  # older releases wrote on behind a torn line
                raise DamageError(f"{path.name} line {number} is damaged: {error}") from None
            found.torn += 1
            continue
        if not (isinstance(event, dict) and {"kind", "time"} <= event.keys()):
            raise DamageError(f"{path.name} line {number} is damaged: it is no event")
    return found


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from (line.rstrip(b"\n") for line in file)
