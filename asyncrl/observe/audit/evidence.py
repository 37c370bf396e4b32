"""What a run's directory holds, frame by frame, each with its location."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.journal import Record
from asyncrl.buffer.log import OPEN, Frame, Scan, first_sequence, segment_paths
from asyncrl.buffer.payloads import unpack_slot
from asyncrl.buffer.retention import Cursors
from asyncrl.data.arrow import Row, read_row
from asyncrl.errors import CorruptSegmentError
from asyncrl.types import Slot


class Location(NamedTuple):
    """Where a frame begins."""

    file: str
    offset: int

    def __str__(self) -> str:
        return f"{self.file} offset {self.offset}"


class DamageError(ValueError):
    """What was found is not what a buffer writes; the message says where."""


class Tally(msgspec.Struct):
    """How much of a log was read."""

    files: int = 0
    frames: int = 0
    bytes: int = 0
    torn_bytes: int = 0
    """After the last whole frame of an open file: cut off at the next resume."""
    first: int = 0
    """Sequence number of the first frame that is still there."""


def read_journal(directory: Path, run_id: str, tally: Tally) -> Iterator[tuple[Location, Record]]:
    """Every decision, in order."""
    for location, frame in _frames(directory, journal.STEM, journal.SCHEMA_HASH, run_id, tally):
        try:
            yield location, journal.decode(frame.payload)
        except ValueError as error:
            raise DamageError(f"{location}: the record cannot be read: {error}") from None


def read_rows(directory: Path, run_id: str, tally: Tally) -> Iterator[tuple[Location, Row]]:
    """Every stored trajectory, in order."""
    for location, frame in _frames(directory, payloads.STEM, payloads.SCHEMA_HASH, run_id, tally):
        try:
            row = read_row(frame.payload)
        except ValueError as error:
            raise DamageError(f"{location}: the trajectory cannot be read: {error}") from None
        if (slot := unpack_slot(frame.slot)) != row.slot:
            raise DamageError(f"{location}: a frame of {slot} holds the trajectory of {row.slot}")
        yield location, row


def stored_slots(directory: Path, run_id: str) -> set[Slot]:
    """Whose trajectories are in the log: all that were acknowledged, and what a kill kept from being so."""
    return {row.slot for _, row in read_rows(directory, run_id, Tally())}


def pruned_below(directory: Path) -> int:
    """The sequence number below which every consumer has let go."""
    return Cursors(directory).lowest()


def _frames(directory: Path, stem: str, schema: bytes, run_id: str, tally: Tally) -> Iterator[tuple[Location, Frame]]:
    """Checks every byte, and that one file follows the other; raises DamageError."""
    paths = segment_paths(directory, stem)
    tally.first = expected = first_sequence(paths[0]) if paths else 0
    for path in paths:
        if first_sequence(path) != expected:
            raise DamageError(
                f"{path.name} begins with frame {first_sequence(path)}, but {expected} comes next: a file is lost"
            )
        if path.suffix == OPEN and path != paths[-1]:
            raise DamageError(f"{path.name} is open, though files follow it")
        scan = Scan(path, schema=schema, run_id=run_id)
        try:
            for frame in scan:
                yield Location(path.name, frame.offset), frame
        except CorruptSegmentError as error:
            raise DamageError(str(error)) from None
        expected += scan.count
        tally.files += 1
        tally.frames += scan.count
        tally.bytes += scan.size
        tally.torn_bytes += 0 if scan.sealed else scan.size - scan.end
