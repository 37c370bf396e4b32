"""Pipes and memory files: read under a deadline, always closed."""

import os
import select
import time
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO


@contextmanager
def memory_file(data: bytes = b"") -> Generator[int]:
    """An anonymous file in memory that contains `data`."""
    descriptor = os.memfd_create("asyncrl")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def pipe() -> Generator[tuple[FileIO, FileIO]]:
    """What is written to the second can be read from the first."""
    reader, writer = os.pipe()
    with FileIO(reader, "rb") as first, FileIO(writer, "wb") as second:
        yield first, second


def read_some(descriptor: int, most: int, deadline: float) -> bytes:
    """What there is, up to `most`; nothing at the end of the stream and when the deadline has passed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    left_s = max(0.0, deadline - time.monotonic())
    return os.read(descriptor, most) if poll.poll(left_s * 1000) else b""


def read_exactly(descriptor: int, size: int, deadline: float) -> bytes | None:
    """All `size` bytes, or None."""
    received = bytearray()
    while len(received) < size:
        more = read_some(descriptor, min(size - len(received), 1 << 16), deadline)
        if not more:
            return None
        received += more
    return bytes(received)
