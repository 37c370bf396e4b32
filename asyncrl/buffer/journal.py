"""The ledger's log: every decision is a record here before it takes effect."""

from pathlib import Path

import msgspec

from asyncrl.buffer.log import Frame, Log, Place, new_digest
from asyncrl.errors import CorruptSegmentError

# What happens to a group, as events. The buffer's state is the fold of these and nothing else.
#
# Every event but `Stored` is a frame of the journal, written before it takes effect; `Stored` is derived from the
# trajectory's own frame.


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base: a positional msgpack array that begins with the event's name."""


class Begun(_Event, frozen=True):
    """First record of a journal: the rules that the arithmetic of the whole run rests on."""

    group_size: int
    groups_per_step: int
    max_staleness: int


class Admitted(_Event, frozen=True):
    group: int
    version: int
    deadline: float
    sample_bytes: int
    """Credit set aside for each sample until its real size is known."""


class Renewed(_Event, frozen=True):
    """A resumed run leases the missing samples of a group again."""

    group: int
    deadline: float


class Stored(_Event, frozen=True):
    group: int
    sample: int
    bytes: int
    tokens: int
    oldest: int
    """Version of the oldest sampled token."""
    reward: float = 0.0


class Dropped(_Event, frozen=True):
    group: int
    reason: str
    sample: int = -1
    """The sample that failed, whose siblings are dropped as `group_incomplete`; -1 when the reason holds for all."""
    tokens: int = 0
    """Tokens of the failed sample."""


class Late(_Event, frozen=True):
    """A sample that arrived after its group had been dropped: only its waste is kept."""

    group: int
    sample: int
    tokens: int


class Delivered(_Event, frozen=True):
    step: int
    groups: tuple[int, ...]


class Committed(_Event, frozen=True):
    """The optimizer has taken the step; its groups are consumed."""

    step: int


class Advanced(_Event, frozen=True):
    """Engines serve this policy version."""

    version: int


class Limited(_Event, frozen=True):
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


STEM = "ledger"
SCHEMA_HASH = new_digest(b"asyncrl ledger 1").digest()
NO_SLOT = bytes(16)
SEGMENT_BYTES = 64 << 20


class Journal:
    """Writes records; at durability `memory` there is no directory and nothing is written."""

    def __init__(self, directory: Path | None, *, run_id: str, sync: bool) -> None:
        self._log = (
            Log(directory, STEM, run_id=run_id, schema=SCHEMA_HASH, segment_bytes=SEGMENT_BYTES, sync=sync)
            if directory
            else None
        )

    def recover(self) -> list[Record]:
        return [_decode(place, frame) for place, frame in self._log.recover()] if self._log else []

    def write(self, *entries: Record) -> None:
        if self._log and entries:
            self._log.append([(NO_SLOT, encode(entry)) for entry in entries])

    @property
    def torn_bytes(self) -> int:
        return self._log.torn_bytes if self._log else 0

    def close(self) -> None:
        if self._log:
            self._log.seal()


def _decode(place: Place, frame: Frame) -> Record:
    try:
        return decode(frame.payload)
    except ValueError as error:
        raise CorruptSegmentError(f"record {place.sequence} of the journal cannot be read: {error}") from None
