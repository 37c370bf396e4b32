"""The ledger's log: every decision is a record here before it takes effect."""

from pathlib import Path

from asyncrl.buffer import records
from asyncrl.buffer.frames import Frame, new_digest
from asyncrl.buffer.log import Log, Place
from asyncrl.buffer.records import Record
from asyncrl.errors import CorruptSegmentError

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
            self._log.append([(NO_SLOT, records.encode(entry)) for entry in entries])

    @property
    def torn_bytes(self) -> int:
        return self._log.torn_bytes if self._log else 0

    def close(self) -> None:
        if self._log:
            self._log.seal()


def _decode(place: Place, frame: Frame) -> Record:
    try:
        return records.decode(frame.payload)
    except ValueError as error:
        raise CorruptSegmentError(f"record {place.sequence} of the journal cannot be read: {error}") from None
