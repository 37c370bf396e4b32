"""An append-only log of checksummed frames in one directory: sealed `<stem>-<first sequence>.seg` files, one `.open`.

`Log` writes. `append` returns when the frames have reached the durability level: the page cache (survives kill -9) or,
with `sync`, the disk. All frames of one call share one write and one sync, which is what makes the disk level
affordable. `Scan` reads one file and checks all of it.

A file consists of

    header   magic, format, schema hash, run id, first sequence number, crc
    frame*   length u32 | crc32c u32 | sequence u64 | slot 16 B | payload
    footer   mark, magic, frame count, digest of everything before, crc      (only in a sealed `.seg` file)

Arrow's own file format is no log: a stream cut between two batches reads back short without an error, and a flipped bit
in a body is not noticed. Here the checksum of a frame covers sequence, slot and payload, sequences are contiguous, and
the digest chains the header and every frame head, so any changed, missing or doubled byte of a sealed file is found. A
bad frame at the end of an `.open` file is what a crash leaves: it was never acknowledged. A bad frame that is followed
by a whole one is damage: to cut there would lose what was acknowledged.
"""

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from asyncrl.errors import ConfigError, CorruptSegmentError, StorageError
from asyncrl.system.storage import crc32c, storing, sync

FORMAT = 1
MAX_PAYLOAD = 64 << 20
"""A longer length is damage: it is refused before anything is allocated for it."""
SEARCHED = 2 * MAX_PAYLOAD
"""Bytes after a fault in which the next frame is looked for."""
WRITE_FRAMES = 500
"""Frames of one system call: two buffers each, and Linux takes 1024."""
RUN_ID_BYTES = 64
OPEN, SEALED = ".open", ".seg"

HEADER = struct.Struct(f"<8sI16s{RUN_ID_BYTES}sQ")
FRAME = struct.Struct("<IIQ16s")
FOOTER = struct.Struct("<I8sQ16s")
CRC = struct.Struct("<I")
SEQUENCE_OFFSET = struct.calcsize("<II")
HEADER_SIZE, FOOTER_SIZE = HEADER.size + CRC.size, FOOTER.size + CRC.size
MAGIC, END_MAGIC, END_MARK = b"ASYNCRL\x01", b"ARLSEAL\x01", 0xFFFFFFFF


# -- the format of a file ----------------------------------------------------------------------------------------


class Header(NamedTuple):
    schema: bytes
    run_id: str
    first: int

    def pack(self) -> bytes:
        run_id = self.run_id.encode()
        if len(run_id) > RUN_ID_BYTES:
            raise ValueError(f"run id {self.run_id!r} is {len(run_id)} bytes long; use at most {RUN_ID_BYTES}")
        return _with_crc(HEADER.pack(MAGIC, FORMAT, self.schema, run_id, self.first))


def unpack_header(raw: bytes) -> Header | None:
    """None when it is damaged, or of another format."""
    if len(raw) < HEADER_SIZE or raw != _with_crc(raw[: HEADER.size]):
        return None
    magic, form, schema, run_id, first = HEADER.unpack(raw[: HEADER.size])
    if magic != MAGIC or form != FORMAT:
        return None
    return Header(schema, run_id.rstrip(b"\0").decode(errors="replace"), first)


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


def _checksum(sequence: int, slot: bytes, payload: bytes) -> int:
    return crc32c(crc32c(0, struct.pack("<Q", sequence) + slot), payload)


def _with_crc(data: bytes) -> bytes:
    return data + CRC.pack(crc32c(0, data))


# -- reading -----------------------------------------------------------------------------------------------------


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
        found = -1
        while (found := rest.find(struct.pack("<Q", wanted), found + 1)) >= 0:
            start = self.end + found - SEQUENCE_OFFSET
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


# -- writing -----------------------------------------------------------------------------------------------------


class Location(NamedTuple):
    """Where a frame lies."""

    segment: int
    """First sequence number of the file."""
    offset: int
    sequence: int


class Log:
    """Write side of a log. Iterate over `recover()` to its end before the first append."""

    def __init__(
        self, directory: Path, stem: str, *, run_id: str, schema: bytes, segment_bytes: int, sync: bool
    ) -> None:
        self._directory, self._stem = directory, stem
        self._run_id, self._schema = run_id, schema
        self._segment_bytes, self._sync = segment_bytes, sync
        self._file = -1
        self._first = self._next = 0
        self._end = 0
        self._digest = new_digest()
        self.torn_bytes = 0
        """Bytes cut off the open file at recovery: a write that a crash had left unfinished."""

    @property
    def next_sequence(self) -> int:
        return self._next

    @property
    def open_bytes(self) -> int:
        """Of the file that is written to."""
        return self._end if self._file >= 0 else 0

    def recover(self, start: int = 0) -> Iterator[tuple[Location, Frame]]:
        """Every frame on disk in order, checked, from the file that holds sequence `start` on; then the log is ready
        to append."""
        expected: int | None = None
        paths = segment_paths(self._directory, self._stem)
        first = max((i for i, path in enumerate(paths) if first_sequence(path) <= start), default=0)
        for path in paths[first:]:
            if self._file >= 0 or expected not in (None, first_sequence(path)):
                raise CorruptSegmentError(f"{path} does not follow the file before it, which ends at {expected}")
            scan = Scan(path, schema=self._schema, run_id=self._run_id)
            for frame in scan:
                yield Location(scan.first, frame.offset, frame.sequence), frame
            self._next = expected = first_sequence(path) + scan.count
            if path.suffix == OPEN:
                self._take_over(scan)

    def append(self, items: Sequence[tuple[bytes, bytes]]) -> list[Location]:
        """Write (slot, payload) frames, all or nothing, durable when it returns."""
        if too_long := [len(payload) for _, payload in items if len(payload) > MAX_PAYLOAD]:
            raise ValueError(f"a payload of {too_long[0]} bytes is longer than the {MAX_PAYLOAD} a frame can hold")
        if self._file >= 0 and self._end >= self._segment_bytes:
            self.seal()
        if self._file < 0:
            self._start()
        heads = [pack_head(self._next + i, slot, payload) for i, (slot, payload) in enumerate(items)]
        locations: list[Location] = []
        end = self._end
        for i, (_, payload) in enumerate(items):
            locations.append(Location(self._first, end, self._next + i))
            end += FRAME.size + len(payload)
        self._write([part for head, (_, payload) in zip(heads, items, strict=True) for part in (head, payload)])
        for head in heads:
            self._digest.update(head)
        self._end, self._next = end, self._next + len(items)
        return locations

    def read(self, location: Location) -> bytes:
        """The payload at `location`, checked again."""
        path = self._path(location.segment, OPEN if location.segment == self._first and self._file >= 0 else SEALED)
        with path.open("rb") as file:
            frame = read_frame(file, location.offset, os.fstat(file.fileno()).st_size)
        if isinstance(frame, str) or frame.sequence != location.sequence:
            raise CorruptSegmentError(f"{path} is damaged at offset {location.offset}: {frame}")
        return frame.payload

    def seal(self) -> None:
        """Close the open file for good: footer, fsync, rename, fsync of the directory."""
        if self._file < 0:
            return
        self._write([pack_footer(self._next - self._first, self._digest.digest())])
        path = self._path(self._first, OPEN)
        with storing(path):
            os.fsync(self._file)
            path.rename(self._path(self._first, SEALED))
            os.close(self._file)
            self._file = -1
            sync(self._directory)

    def prune(self, before: int) -> list[tuple[Path, int]]:
        """Delete the sealed files that hold only sequences below `before`; returns them with their bytes. The newest
        file stays: its name and its frames say where sequences go on after a restart."""
        paths = segment_paths(self._directory, self._stem)
        ends = (first_sequence(path) for path in paths[1:])
        doomed = [path for path, end in zip(paths, ends, strict=False) if path.suffix == SEALED and end <= before]
        found = [(path, path.stat().st_size) for path in doomed]
        for path in doomed:  # the oldest first: a kill leaves files that follow each other
            path.unlink()
        if doomed:
            sync(self._directory)
        return found

    @property
    def first_kept(self) -> int:
        """The first sequence that is still there."""
        return min(map(first_sequence, segment_paths(self._directory, self._stem)), default=self._next)

    def first_within(self, most: int) -> int:
        """Where the newest files begin that have at most `most` bytes together."""
        first = self._next
        for path in reversed(segment_paths(self._directory, self._stem)):
            most -= path.stat().st_size
            if most < 0:
                break
            first = first_sequence(path)
        return first

    def _start(self) -> None:
        header = Header(self._schema, self._run_id, self._next).pack()
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        path = self._path(self._next, OPEN)
        with storing(path):
            self._file = os.open(path, flags, 0o600)
        self._first, self._end = self._next, 0
        try:
            self._write([header])
        except OSError:
            os.close(self._file)
            self._file = -1
            raise
        self._digest = new_digest()
        self._digest.update(header)
        self._end = HEADER_SIZE
        if self._sync:
            with storing(path):
                sync(self._directory)

    def _take_over(self, scan: Scan) -> None:
        """Go on with the open file of a writer that is gone."""
        self.torn_bytes += 0 if scan.sealed else scan.size - scan.end
        if not scan.end:
            return  # not even a header: the next append makes the file anew
        self._file = os.open(scan.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._first, self._end, self._digest = scan.first, scan.end, scan.digest
        if scan.sealed:
            self.seal()
        else:
            os.ftruncate(self._file, scan.end)

    def _write(self, parts: Sequence[bytes]) -> None:
        """All of `parts` at the end of the file, or the file as it was and an error that says what to do."""
        offset = self._end
        try:
            for i in range(0, len(parts), 2 * WRITE_FRAMES):
                batch = parts[i : i + 2 * WRITE_FRAMES]
                size = sum(map(len, batch))
                done = os.pwritev(self._file, batch, offset)
                if done < size:  # a disk that is nearly full takes a part, and gives its reason at the next try
                    rest = b"".join(batch)
                    while done < size:
                        done += os.pwrite(self._file, rest[done:], offset + done)
                offset += size
            if self._sync:
                os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            path = self._path(self._first, OPEN)
            message = f"{error.strerror}; nothing of this call was stored, make room and try again (asyncrl resume)"
            raise StorageError(error.errno, message, str(path)) from error

    def _path(self, first: int, suffix: str) -> Path:
        return self._directory / f"{self._stem}-{first:015d}{suffix}"


# -- the directory -----------------------------------------------------------------------------------------------


def segment_paths(directory: Path, stem: str) -> list[Path]:
    """The files of a log, oldest first."""
    found = [path for suffix in (SEALED, OPEN) for path in directory.glob(f"{stem}-*{suffix}")]
    return sorted(found, key=first_sequence)


def first_sequence(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    if not (number.isascii() and number.isdecimal()):
        raise CorruptSegmentError(f"{path} is no file of this log: its name must end with a sequence number")
    return int(number)


LOCK_S = 15.0
"""A killed process holds its lock until the kernel has taken it apart, which takes longer the more memory it has."""


def lock_directory(directory: Path) -> int:
    """Make the directory this process's own; the kernel lets go of it even after kill -9."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise ConfigError(
                    f"{directory} is in use by another process; end that run, or choose another name"
                ) from None
        time.sleep(0.05)
