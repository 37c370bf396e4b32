"""Durable positions of the consumers of a log. A segment may go only when every one of them is past it."""

import os
import re
from pathlib import Path

import msgspec

from asyncrl.buffer.log import sync_directory

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Cursors:
    """One small file per consumer, replaced atomically; the sequence in it is the first one still needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def all(self) -> dict[str, int]:
        return {path.suffix[1:]: msgspec.json.decode(path.read_bytes(), type=int) for path in self._paths()}

    def move(self, consumer: str, sequence: int) -> None:
        if not NAME.fullmatch(consumer):
            raise ValueError(f"consumer {consumer!r} must match {NAME.pattern}, such as `trainer`")
        path = self._directory / f"cursor.{consumer}"
        fresh = self._directory / f".cursor.{consumer}"
        handle = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(handle, msgspec.json.encode(sequence))
            os.fsync(handle)
        finally:
            os.close(handle)
        fresh.rename(path)
        sync_directory(self._directory)

    def lowest(self) -> int:
        """The first sequence that some consumer still needs; 0 while there is no consumer."""
        return min(self.all().values(), default=0)

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob("cursor.*"))
