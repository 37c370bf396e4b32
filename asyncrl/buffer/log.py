"""An append-only log of frames in one directory: `<stem>-<first sequence>.seg` files and one `.open` file.

`append` returns when the frames have reached the durability level: the page cache (survives kill -9) or, with `sync`,
the disk. All frames of one call share one write and one sync, which is what makes the disk level affordable.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.buffer import frames
from asyncrl.buffer.frames import FRAME, HEADER_SIZE, MAX_PAYLOAD, OPEN, SEALED, Frame, Header, Scan
from asyncrl.errors import ConfigError, CorruptSegmentError, StorageError

WRITE_FRAMES = 500
"""Frames of one system call: two buffers each, and Linux takes 1024."""


class Place(NamedTuple):
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
        self._digest = frames.new_digest()
        self.torn_bytes = 0
        """Bytes cut off the open file at recovery: a write that a crash had left unfinished."""

    @property
    def next_sequence(self) -> int:
        return self._next

    def recover(self) -> Iterator[tuple[Place, Frame]]:
        """Every frame on disk in order, checked; then the log is ready to append."""
        expected: int | None = None
        for path in segment_paths(self._directory, self._stem):
            if self._file >= 0 or expected not in (None, first_sequence(path)):
                raise CorruptSegmentError(f"{path} does not follow the file before it, which ends at {expected}")
            scan = Scan(path, schema=self._schema, run_id=self._run_id)
            for frame in scan:
                yield Place(scan.first, frame.offset, frame.sequence), frame
            self._next = expected = first_sequence(path) + scan.count
            if path.suffix == OPEN:
                self._take_over(scan)

    def append(self, items: Sequence[tuple[bytes, bytes]]) -> list[Place]:
        """Write (slot, payload) frames, all or nothing, durable when it returns."""
        if too_long := [len(payload) for _, payload in items if len(payload) > MAX_PAYLOAD]:
            raise ValueError(f"a payload of {too_long[0]} bytes is longer than the {MAX_PAYLOAD} a frame can hold")
        if self._file >= 0 and self._end >= self._segment_bytes:
            self.seal()
        if self._file < 0:
            self._start()
        heads = [frames.pack_head(self._next + i, slot, payload) for i, (slot, payload) in enumerate(items)]
        places: list[Place] = []
        end = self._end
        for i, (_, payload) in enumerate(items):
            places.append(Place(self._first, end, self._next + i))
            end += FRAME.size + len(payload)
        self._write([part for head, (_, payload) in zip(heads, items, strict=True) for part in (head, payload)])
        for head in heads:
            self._digest.update(head)
        self._end, self._next = end, self._next + len(items)
        return places

    def read(self, place: Place) -> bytes:
        """The payload at `place`, checked again."""
        path = self._path(place.segment, OPEN if place.segment == self._first and self._file >= 0 else SEALED)
        with path.open("rb") as file:
            frame = frames.read_frame(file, place.offset, os.fstat(file.fileno()).st_size)
        if isinstance(frame, str) or frame.sequence != place.sequence:
            raise CorruptSegmentError(f"{path} is damaged at offset {place.offset}: {frame}")
        return frame.payload

    def seal(self) -> None:
        """Close the open file for good: footer, fsync, rename, fsync of the directory."""
        if self._file < 0:
            return
        self._write([frames.pack_footer(self._next - self._first, self._digest.digest())])
        os.fsync(self._file)
        self._path(self._first, OPEN).rename(self._path(self._first, SEALED))
        os.close(self._file)
        self._file = -1
        sync_directory(self._directory)

    def prune(self, before: int) -> list[Path]:
        """Delete the sealed files that hold only sequences below `before`."""
        paths = segment_paths(self._directory, self._stem)
        ends = [*(first_sequence(path) for path in paths[1:]), self._next]
        doomed = [path for path, end in zip(paths, ends, strict=True) if path.suffix == SEALED and end <= before]
        for path in doomed:
            path.unlink()
        sync_directory(self._directory)
        return doomed

    def _start(self) -> None:
        header = Header(self._schema, self._run_id, self._next).pack()
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path(self._next, OPEN), flags, 0o600)
        self._first, self._end = self._next, 0
        try:
            self._write([header])
        except OSError:
            os.close(self._file)
            self._file = -1
            raise
        self._digest = frames.new_digest()
        self._digest.update(header)
        self._end = HEADER_SIZE
        if self._sync:
            sync_directory(self._directory)

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


def segment_paths(directory: Path, stem: str) -> list[Path]:
    """The files of a log, oldest first."""
    found = [path for suffix in (SEALED, OPEN) for path in directory.glob(f"{stem}-*{suffix}")]
    return sorted(found, key=first_sequence)


def first_sequence(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    if not (number.isascii() and number.isdecimal()):
        raise CorruptSegmentError(f"{path} is no file of this log: its name must end with a sequence number")
    return int(number)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_directory(directory: Path) -> int:
    """Make the directory this process's own; the kernel lets go of it even after kill -9."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{directory} is in use by another process; end that run, or choose another name") from None
    return handle
