"""Where the frames of a log lie, for readers in a hurry: lengths are followed, checksums are `asyncrl check`'s job."""

import io
import mmap
import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.buffer.log import (
    FRAME,
    HEADER_SIZE,
    MAX_PAYLOAD,
    OPEN,
    SEALED,
    first_sequence,
    read_frame,
    segment_paths,
    unpack_header,
)
from asyncrl.errors import CorruptSegmentError

Positions = npt.NDArray[np.int64]
"""Byte offsets into one file, one for each frame."""
LENGTH = struct.Struct("<I")
FIRST_PAYLOAD, MARK_BYTES = HEADER_SIZE + FRAME.size, 16
STRIDE, WINDOW = 1 << 17, 1 << 13
"""Between two places where a walk may begin, and how far its beginning is looked for there."""


class File(NamedTuple):
    """What one file of a log held when it was opened, whatever its run writes, seals or prunes later."""

    path: Path
    data: bytes | mmap.mmap
    first: int
    """Sequence number of the first frame."""

    def damaged(self, fault: object) -> CorruptSegmentError:
        return CorruptSegmentError(f"{self.path} is damaged ({fault}): see `asyncrl check`")


class Framed(NamedTuple):
    """The whole frames of one file."""

    file: File
    starts: Positions
    """Of the payloads."""
    ends: Positions


def open_files(directory: Path, stem: str, schema: bytes) -> Iterator[File]:
    """The files of a log, oldest first. Nothing is locked."""
    return (file for path in segment_paths(directory, stem) if (file := _present(path, schema)) is not None)


def newest_file(directory: Path, stem: str, schema: bytes) -> Framed | None:
    """The last file of a log that holds a frame."""
    files = (_present(path, schema) for path in reversed(segment_paths(directory, stem)))
    found = (find_frames(file) for file in files if file is not None)
    return next((framed for framed in found if len(framed.starts)), None)


def _present(path: Path, schema: bytes) -> File | None:
    """None if it is being made, or is no more."""
    try:
        return _open(path, schema)
    except FileNotFoundError:  # sealed, and thereby renamed, or pruned
        sealed = path.with_suffix(SEALED)
        return _open(sealed, schema) if sealed.exists() else None


def _open(path: Path, schema: bytes) -> File | None:
    with path.open("rb") as file:
        # An open file is not mapped: a run that is resumed cuts its torn end off.
        mapped = path.suffix == SEALED and os.fstat(file.fileno()).st_size > 0
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
    header = unpack_header(data[:HEADER_SIZE])
    if header is None and path.suffix == OPEN:
        return None
    if header is None or header.schema != schema:
        raise CorruptSegmentError(f"{path} is no file of this version of asyncrl, or damaged: see `asyncrl check`")
    return File(path, data, header.first)


def find_frames(file: File, mark: bytes = b"") -> Framed:
    """`mark` is how most payloads begin; unless it is given, as the first one does."""
    path, data, _ = file
    bounds = _bounds(data, mark or data[FIRST_PAYLOAD : FIRST_PAYLOAD + MARK_BYTES])
    if path.suffix == OPEN and len(bounds) > 1:
        last = read_frame(io.BytesIO(data), int(bounds[-2]), len(data))
        bounds = bounds[:-1] if isinstance(last, str) else bounds
    return Framed(file, bounds[:-1] + FRAME.size, bounds[1:])


def _bounds(data: bytes | mmap.mmap, mark: bytes) -> Positions:
    """Where frames begin, and where the last one ends.

    A frame says how long it is, and so where the next one begins. To follow a million of them one by one takes half a
    second; a long file is walked from many places at once, from where payloads seem to begin. If each walk arrives
    exactly where another one set out, all of them set out from frames.
    """
    anchors = [HEADER_SIZE]
    for place in range(FIRST_PAYLOAD + STRIDE, len(data), STRIDE):
        if (found := data[place : place + WINDOW].find(mark)) >= 0:
            anchors.append(place + found - FRAME.size)
    leaps = _leap(data, np.array(anchors, np.int64))
    return _walk(data, HEADER_SIZE) if leaps is None else np.concatenate([leaps, _walk(data, anchors[-1])])


def _leap(data: bytes | mmap.mmap, anchors: Positions) -> Positions | None:
    """The frames before the last anchor; None when an anchor is no frame."""
    lengths = np.ndarray((len(data) - LENGTH.size + 1,), "<u4", data, strides=(1,))  # those that begin at each byte
    places, goals = anchors[:-1], anchors[1:]
    found = [places]
    while len(places):
        places = places + lengths[places] + FRAME.size
        short = places < goals
        if not short.all():
            if (places > goals).any():
                return None
            places, goals = places[short], goals[short]
        found.append(places)
    return np.sort(np.concatenate(found), kind="stable")  # which is fast where long parts are in order already


def _walk(data: bytes | mmap.mmap, place: int) -> Positions:
    """The frames from `place` on, and the end of the last: before a footer (its mark is no length) or a torn write."""
    bounds: list[int] = []
    last = len(data) - FRAME.size
    while place <= last:
        length = LENGTH.unpack_from(data, place)[0]
        if length > MAX_PAYLOAD:
            break
        bounds.append(place)
        place += FRAME.size + length
    if place <= len(data):
        bounds.append(place)
    return np.array(bounds, np.int64)


class Tail:
    """The payloads that a log gains, read as they come, from the last few of those that are there."""

    def __init__(self, directory: Path, stem: str, schema: bytes, keep: int) -> None:
        self._directory, self._stem = directory, stem
        self._path: Path | None = None
        self._place = 0
        if (newest := newest_file(directory, stem, schema)) is not None:
            self._path = newest.file.path
            self._place = int(newest.starts[-keep:][0]) - FRAME.size

    def read(self) -> Iterator[bytes]:
        """What is whole by now."""
        for path in segment_paths(self._directory, self._stem):
            first = first_sequence(path)
            if self._path is not None and first < first_sequence(self._path):
                continue
            if self._path is None or first > first_sequence(self._path):
                self._place = HEADER_SIZE
            self._path = path
            yield from self._rest(path)

    def _rest(self, path: Path) -> Iterator[bytes]:
        try:
            file = path.open("rb")
        except FileNotFoundError:  # it is being sealed, and read the next time
            return
        with file:
            file.seek(self._place)
            data = file.read()
        bounds = _walk(data, 0)
        for start, end in pairwise(bounds.tolist()):
            yield data[start + FRAME.size : end]
        self._place += int(bounds[-1]) if len(bounds) else 0
