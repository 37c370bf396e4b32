"""The journal: every decision of the buffer is a record here before it takes effect.

The buffer's state is the fold of its events and nothing else (see `ledger`). Every event but `Stored` is a record in a
frame of its own; `Stored` is derived from the frame of the trajectory.

On disk a record is a msgpack array: its tag, then its fields in order. Tags and fields are the format of every run
directory there is. So each tag is written out: renaming a class must not change it. A new field goes to the end and has
a default.
"""

from pathlib import Path

import msgspec

from asyncrl.buffer.log import Frame, Location, Log, new_digest
from asyncrl.errors import CorruptSegmentError

STEM = "ledger"
SCHEMA_HASH = new_digest(b"asyncrl ledger 1").digest()
NO_SLOT = bytes(16)
"""Records belong to no slot of the log's frames."""
SEGMENT_BYTES = 64 << 20


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


class Dropped(_Event, frozen=True, tag="Dropped"):
    """A group ended without being trained on."""

    group: int
    reason: str
    """A value of `DropReason` or a user's `stage:NAME`; journals of other releases may hold others."""
    sample: int = -1
    """The sample that failed, whose siblings are dropped as `group_incomplete`; -1 when the reason holds for all."""
    tokens: int = 0
    """Tokens of the failed sample."""


class Late(_Event, frozen=True, tag="Late"):
    """A sample that arrived after its group had been dropped: only its waste is kept."""

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


Record = Begun | Admitted | Renewed | Dropped | Late | Delivered | Committed | Advanced | Limited
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

    def __init__(self, directory: Path | None, *, run_id: str, sync: bool) -> None:
        self._log = (
            Log(directory, STEM, run_id=run_id, schema=SCHEMA_HASH, segment_bytes=SEGMENT_BYTES, sync=sync)
            if directory
            else None
        )

    def recover(self) -> list[Record]:
        return [_decode(location, frame) for location, frame in self._log.recover()] if self._log else []

    def write(self, *records: Record) -> None:
        if self._log and records:
            self._log.append([(NO_SLOT, encode(record)) for record in records])

    @property
    def torn_bytes(self) -> int:
        return self._log.torn_bytes if self._log else 0

    def close(self) -> None:
        if self._log:
            self._log.seal()


def _decode(location: Location, frame: Frame) -> Record:
    try:
        return decode(frame.payload)
    except ValueError as error:
        raise CorruptSegmentError(f"record {location.sequence} of the journal cannot be read: {error}") from None
