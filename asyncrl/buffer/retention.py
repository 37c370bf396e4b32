"""What may go: durable positions of the consumers of a log, and what was pruned behind them.

A segment is deleted only when every consumer is past it, and only if `buffer.keep` does not keep it.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.journal import Folded, first_record
from asyncrl.buffer.log import first_sequence, segment_paths
from asyncrl.system.run_directory import replace

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Cursors:
    """One small file per consumer, replaced atomically; the sequence in it is the first one still needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def all(self) -> dict[str, int]:
        return {path.suffix[1:]: msgspec.json.decode(path.read_bytes(), type=int) for path in self._paths()}

    def move(self, consumer: str, sequence: int) -> None:
        if not NAME.fullmatch(consumer):
            raise ValueError(f"consumer {consumer!r} must match {NAME.pattern}, such as `trainer`")
        replace(self._directory / f"cursor.{consumer}", msgspec.json.encode(sequence))

    def lowest(self) -> int:
        """The first sequence that some consumer still needs; 0 while there is no consumer."""
        return min(self.all().values(), default=0)

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob("cursor.*"))


class Pruning(NamedTuple):
    """Files that were deleted at one time."""

    files: list[str] = []  # noqa: RUF012  (nobody changes it)
    bytes: int = 0


class Pruned(NamedTuple):
    """What a directory does not have any more."""

    trajectories: int
    steps: int
    """Of which the journal has no records."""

    def __bool__(self) -> bool:
        return bool(self.trajectories or self.steps)

    def __str__(self) -> str:
        return f"the first {self.trajectories} trajectories and the records of the first {self.steps} steps were pruned"


def read_pruned(directory: Path) -> Pruned:
    """From the first file of each log: a sequence number counts the frames before it."""
    logs = segment_paths(directory, payloads.STEM)
    journals = segment_paths(directory, journal.STEM)
    first = first_record(journals[0]) if journals else None
    return Pruned(first_sequence(logs[0]) if logs else 0, first.step if isinstance(first, Folded) else 0)
