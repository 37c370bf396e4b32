"""The journal: every decision of the buffer is a record here before it takes effect.

The buffer's state is the fold of its events and nothing else (see `ledger`). Every event but `Stored` is a record in a
frame of its own; `Stored` is derived from the frame of the trajectory.

A journal does not have to be read from its beginning: now and then a new file begins with `Folded`, the state after all
records before it. A run opens with the last such file that its checkpoint allows, however old the run is.

On disk a record is a msgpack array: its tag, then its fields in order. Tags and fields are the format of every run
directory there is. So each tag is written out: renaming a class must not change it. A new field goes to the end and has
a default.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.buffer.log import (
    HEADER_SIZE,
    Frame,
    Location,
    Log,
    first_sequence,
    new_digest,
    read_frame,
    segment_paths,
)
from asyncrl.curriculum.policy import CurriculumState
from asyncrl.errors import CorruptSegmentError

STEM = "ledger"
SCHEMA_HASH = new_digest(b"asyncrl ledger 1").digest()
NO_SLOT = bytes(16)
"""Records belong to no slot of the log's frames."""
FILE_BYTES = 256 << 10
"""A new file begins with the first commit after so many bytes, or eight times what `Folded` takes."""
UNBOUNDED = 1 << 62


# -- records -----------------------------------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base: a positional array that begins with the tag of its subclass."""


class Begun(_Event, frozen=True, tag="Begun"):
    """First record of a journal: the rules that the arithmetic of the whole run rests on."""

    group_size: int
    groups_per_step: int
    max_staleness: int


class Admitted(_Event, frozen=True, tag="Admitted"):
    """A ticket was issued: the slots of a group are reserved."""

    group: int
    version: int
    deadline: float
    sample_bytes: int
    """Memory reserved for each sample until its real size is known."""


class Asked(_Event, frozen=True, tag="Asked"):
    """A curriculum chose the prompt of the group that is admitted next. It counts with the admission."""

    group: int
    prompt: int
    """Its index in the training stream of the task."""
    drawn: int
    """What its source has given then; -1 for a prompt that was asked before."""


class Measured(_Event, frozen=True, tag="Measured"):
    """What a curriculum learned from groups that have ended. Their samples may be pruned before the journal is."""

    step: int
    prompts: tuple[int, ...]
    rates: tuple[float, ...]
    """Mean rewards."""


class Renewed(_Event, frozen=True, tag="Renewed"):
    """A new ticket was issued for the missing samples of a group, whose process was killed."""

    group: int
    deadline: float


class Stored(_Event, frozen=True, tag="Stored"):
    """A slot was filled."""

    group: int
    sample: int
    bytes: int
    tokens: int
    oldest: int
    """Version of the oldest sampled token."""
    reward: float = 0.0
    uneven: bool = False
    """Of an episode whose turns earned different rewards: it has something to teach by itself."""


class Dropped(_Event, frozen=True, tag="Dropped"):
    """A group ended without being trained on."""

    group: int
    reason: str
    """A value of `DropReason` or a user's `stage:NAME`; journals of other releases may hold others."""
    sample: int = -1
    """The sample that failed, whose siblings are dropped as `group_incomplete`; -1 when the reason holds for all."""
    tokens: int = 0
    """Tokens of the failed sample."""


class Failed(_Event, frozen=True, tag="Failed"):
    """A sample ended without a trajectory, and the others of its group are to be trained on without it."""

    group: int
    sample: int
    reason: str
    """As that of `Dropped`."""
    tokens: int = 0
    """Sampled for it; 0 also if it may still arrive."""


class Late(_Event, frozen=True, tag="Late"):
    """A sample that arrived after it or its group had been given up: only its waste is kept."""

    group: int
    sample: int
    tokens: int


class Delivered(_Event, frozen=True, tag="Delivered"):
    """The trainer took these groups for one forward and backward of `step`."""

    step: int
    groups: tuple[int, ...]


class Committed(_Event, frozen=True, tag="Committed"):
    """The optimizer has taken the step; its groups are consumed."""

    step: int


class Advanced(_Event, frozen=True, tag="Advanced"):
    """Engines serve this policy version."""

    version: int


class Limited(_Event, frozen=True, tag="Limited"):
    """Groups are admitted under this staleness bound from now on; before the first, under that of `Begun`."""

    staleness: int


class FoldedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group that waits. Its samples are in the log of trajectories."""

    group: int
    version: int
    expiry: int
    deadline: float
    sample_bytes: int
    failed: tuple[tuple[int, str], ...] = ()
    """Samples and reasons."""
    prompt: int = -1
    """That a curriculum chose."""


class Folded(_Event, frozen=True, tag="Folded"):
    """The state after a commit, with all records before this one in it."""

    begun: Begun
    step: int
    version: int
    next_group: int
    bound: int
    latest_expiry: int
    sample_bytes: int
    consumed: int
    """Slots."""
    drops: dict[str, int]
    """Slots by reason."""
    waste: dict[str, int]
    """Tokens by reason."""
    waiting: tuple[FoldedGroup, ...]
    ended: tuple[Dropped, ...]
    """Groups dropped recently: samples of theirs may still arrive."""
    late: tuple[tuple[int, int], ...]
    """Slots of these groups whose tokens are counted already."""
    first_sequence: int
    """Of the log of trajectories: the first that waiting groups need."""
    failed: tuple[Failed, ...] = ()
    """Recently: they may still arrive."""
    curriculum: CurriculumState | None = None


Record = (
    Begun
    | Admitted
    | Asked
    | Measured
    | Renewed
    | Dropped
    | Failed
    | Late
    | Delivered
    | Committed
    | Advanced
    | Limited
    | Folded
)
Event = Record | Stored

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


def decode(payload: bytes) -> Record:
    """Read a record back, or raise ValueError with what is wrong with it."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None


# -- the file ----------------------------------------------------------------------------------------------------


class Journal:
    """Writes records; at durability `memory` there is no directory and nothing is written."""

    def __init__(self, directory: Path | None, *, run_id: str, sync: bool, file_bytes: int = FILE_BYTES) -> None:
        self._directory, self._file_bytes = directory, file_bytes
        self._log = (
            Log(directory, STEM, run_id=run_id, schema=SCHEMA_HASH, segment_bytes=UNBOUNDED, sync=sync)
            if directory
            else None
        )
        self._folded_bytes = 0

    def recover(self, step: int = 0) -> list[Record]:
        """What a run needs that is resumed after `step` optimizer steps; then the journal is ready to append."""
        if not self._log or not self._directory:
            return []
        start = 0
        for path in reversed(segment_paths(self._directory, STEM)):
            start = first_sequence(path)
            first = first_record(path)
            if isinstance(first, Folded) and first.step <= step:
                break
        return [_decode(location, frame) for location, frame in self._log.recover(start)]

    def write(self, *records: Record) -> None:
        if self._log and records:
            self._log.append([(NO_SLOT, encode(record)) for record in records])

    @property
    def is_long(self) -> bool:
        """Whether the present file should be the past."""
        return self._log is not None and self._log.open_bytes > max(self._file_bytes, 8 * self._folded_bytes)

    def fold(self, folded: Folded) -> None:
        """Begin a new file with the state."""
        if self._log:
            payload = encode(folded)
            self._folded_bytes = len(payload)
            self._log.seal()
            self._log.append([(NO_SLOT, payload)])

    def prune(self, allowed: Callable[[Folded], bool]) -> list[tuple[Path, int]]:
        """Delete the files before the last one whose `Folded` may be the beginning; returns them with their bytes."""
        if not self._log or not self._directory:
            return []
        for path in reversed(segment_paths(self._directory, STEM)):
            first = first_record(path)
            if isinstance(first, Folded) and allowed(first):
                return self._log.prune(first_sequence(path))
        return []

    @property
    def torn_bytes(self) -> int:
        return self._log.torn_bytes if self._log else 0

    def close(self) -> None:
        if self._log:
            self._log.seal()


def first_record(path: Path) -> Record | None:
    """Of one file of a journal; None if it has none yet, or a damaged one."""
    with path.open("rb") as file:
        frame = read_frame(file, HEADER_SIZE, os.fstat(file.fileno()).st_size)
    try:
        return None if isinstance(frame, str) else decode(frame.payload)
    except ValueError:
        return None


def _decode(location: Location, frame: Frame) -> Record:
    try:
        return decode(frame.payload)
    except ValueError as error:
        raise CorruptSegmentError(f"record {location.sequence} of the journal cannot be read: {error}") from None
