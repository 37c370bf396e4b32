"""The file format of the buffer's logs: checksummed frames between a header and, once sealed, a footer.

    header   magic, format, schema hash, run id, first sequence number, crc
    frame*   length u32 | crc32c u32 | sequence u64 | slot 16 B | payload
    footer   mark, magic, frame count, digest of everything before, crc      (only in a sealed `.seg` file)

Arrow's own file format is no log: a stream cut between two batches reads back short without an error, and a flipped
bit in a body is not noticed. Here the checksum of a frame covers sequence, slot and payload, sequences are contiguous,
and the digest chains the header and every frame head, so any changed, missing or doubled byte of a sealed file is
found. A frame that is bad at the end of an `.open` file is what a crash leaves: it was never acknowledged. One that is
followed by a whole frame is damage: to cut there would lose what was acknowledged.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import google_crc32c

from asyncrl.errors import CorruptSegmentError

crc32c = cast(Callable[[int, bytes], int], cast(Any, google_crc32c).extend)  # untyped

FORMAT = 1
MAX_PAYLOAD = 64 << 20
"""A longer length is damage: it is refused before anything is allocated for it."""
SEARCHED = 2 * MAX_PAYLOAD
"""Bytes after a fault in which the next frame is looked for."""
RUN_ID_BYTES = 64
OPEN, SEALED = ".open", ".seg"

HEADER = struct.Struct(f"<8sI16s{RUN_ID_BYTES}sQ")
FRAME = struct.Struct("<IIQ16s")
FOOTER = struct.Struct("<I8sQ16s")
CRC = struct.Struct("<I")
SEQUENCE_OFFSET = struct.calcsize("<II")
HEADER_SIZE, FOOTER_SIZE = HEADER.size + CRC.size, FOOTER.size + CRC.size
MAGIC, END_MAGIC, END_MARK = b"ASYNCRL\x01", b"ARLSEAL\x01", 0xFFFFFFFF


class Header(NamedTuple):
    schema: bytes
    run_id: str
    first: int

    def pack(self) -> bytes:
        run_id = self.run_id.encode()
        if len(run_id) > RUN_ID_BYTES:
            raise ValueError(f"run id {self.run_id!r} is {len(run_id)} bytes long; use at most {RUN_ID_BYTES}")
        return _with_crc(HEADER.pack(MAGIC, FORMAT, self.schema, run_id, self.first))


class Frame(NamedTuple):
    offset: int
    head: bytes
    sequence: int
    slot: bytes
    payload: bytes


def pack_head(sequence: int, slot: bytes, payload: bytes) -> bytes:
    """The 32 bytes before a payload; kept apart from it so that the payload is never copied."""
    return FRAME.pack(len(payload), _checksum(sequence, slot, payload), sequence, slot)


def pack_footer(count: int, digest: bytes) -> bytes:
    return _with_crc(FOOTER.pack(END_MARK, END_MAGIC, count, digest))


def new_digest(data: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=16)


def read_frame(file: BinaryIO, offset: int, limit: int) -> Frame | str:
    """The frame at `offset`, or what is wrong with it. `limit` is the end of the file."""
    file.seek(offset)
    head = file.read(FRAME.size)
    if len(head) < FRAME.size:
        return "the file ends inside a frame head"
    length, crc, sequence, slot = FRAME.unpack(head)
    if length > MAX_PAYLOAD or offset + FRAME.size + length > limit:
        return f"a frame of {length} bytes cannot be there"
    payload = file.read(length)
    if len(payload) < length or crc != _checksum(sequence, slot, payload):
        return "the checksum does not match"
    return Frame(offset, head, sequence, slot, payload)


class Scan:
    """Iterates over the frames of one file and checks all of it.

    A fault raises CorruptSegmentError in a sealed file, and in an open one if a whole frame follows it; otherwise it
    ends the iteration, with the reason in `fault` and the end of what is good in `end`.
    """

    def __init__(self, path: Path, *, schema: bytes, run_id: str | None = None) -> None:
        self.path = path
        self._schema, self._run_id = schema, run_id
        self.first = 0
        self.end = 0
        """Where the good frames end; 0 when a crash left not even a whole header."""
        self.size = 0
        self.count = 0
        self.sealed = False
        self.fault = ""
        self.digest = new_digest()

    def __iter__(self) -> Iterator[Frame]:
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self._read_header(file):
                yield from self._frames(file)
        if self.path.suffix == SEALED and not self.sealed:
            raise self._corrupt(self.fault or "the footer is missing")

    def _read_header(self, file: BinaryIO) -> bool:
        raw = file.read(HEADER_SIZE)
        header = unpack_header(raw)
        if header is None:
            self.fault = "the header is damaged"
            if self.size > HEADER_SIZE:  # it held frames, so this is no crash at its creation
                raise self._corrupt(self.fault)
            return False
        if header.schema != self._schema or self._run_id not in (None, header.run_id):
            wanted = "" if self._run_id is None else f", not to run {self._run_id!r}"
            raise self._corrupt(f"it belongs to run {header.run_id!r} or to another schema{wanted}")
        self.digest.update(raw)
        self.first, self.end = header.first, HEADER_SIZE
        return True

    def _frames(self, file: BinaryIO) -> Iterator[Frame]:
        while self.end < self.size:
            if self._is_footer(file):
                self.sealed = True
                return
            frame = read_frame(file, self.end, self.size)
            if isinstance(frame, Frame) and frame.sequence != self.first + self.count:
                frame = f"sequence {frame.sequence} where {self.first + self.count} belongs"
            if isinstance(frame, str):
                self.fault = frame
                if self._is_followed(file):
                    raise self._corrupt(f"{frame}, yet whole frames follow it, so it is no write that a crash tore")
                return
            self.digest.update(frame.head)
            self.end += FRAME.size + len(frame.payload)
            self.count += 1
            yield frame

    def _is_followed(self, file: BinaryIO) -> bool:
        """Whether the frame after the one that belongs here is in the rest of the file."""
        file.seek(self.end)
        rest = file.read(SEARCHED)
        wanted = self.first + self.count + 1
        place = -1
        while (place := rest.find(struct.pack("<Q", wanted), place + 1)) >= 0:
            start = self.end + place - SEQUENCE_OFFSET
            if start > self.end and isinstance(read_frame(file, start, self.size), Frame):
                return True
        return False

    def _is_footer(self, file: BinaryIO) -> bool:
        if self.size - self.end != FOOTER_SIZE:
            return False
        file.seek(self.end)
        return file.read(FOOTER_SIZE) == pack_footer(self.count, self.digest.digest())

    def _corrupt(self, fault: str) -> CorruptSegmentError:
        return CorruptSegmentError(f"{self.path} is damaged at offset {self.end}: {fault}")


def unpack_header(raw: bytes) -> Header | None:
    """None when it is damaged, or of another format."""
    if len(raw) < HEADER_SIZE or raw != _with_crc(raw[: HEADER.size]):
        return None
    magic, form, schema, run_id, first = HEADER.unpack(raw[: HEADER.size])
    if magic != MAGIC or form != FORMAT:
        return None
    return Header(schema, run_id.rstrip(b"\0").decode(errors="replace"), first)


def _checksum(sequence: int, slot: bytes, payload: bytes) -> int:
    return crc32c(crc32c(0, struct.pack("<Q", sequence) + slot), payload)


def _with_crc(data: bytes) -> bytes:
    return data + CRC.pack(crc32c(0, data))
