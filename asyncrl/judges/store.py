"""Verdicts and what they have cost, in one SQLite file of the run's directory that survives kill -9.

sqlite3 runs/NAME/judge.sqlite "SELECT points, reply FROM verdicts"
"""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from errno import EIO
from pathlib import Path

import msgspec

from asyncrl.errors import CheckpointError, StorageError
from asyncrl.judges.form import Points
from asyncrl.system.storage import WAY_OUT

LONGEST = 4000
"""Characters of a reply that are kept, the last ones."""
ENTRY_BYTES = 100
"""Of an entry, beside its texts."""
TABLES = """
CREATE TABLE IF NOT EXISTS verdicts
    (number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, points TEXT NOT NULL, reply TEXT NOT NULL, bytes INTEGER);
CREATE TABLE IF NOT EXISTS cost (one INTEGER PRIMARY KEY CHECK (one = 1), counters TEXT NOT NULL);
"""
_points = msgspec.json.Decoder(Points)


class JudgeStats(msgspec.Struct, kw_only=True):
    """What the judge of a run has done and cost, over all its attempts."""

    calls: int = 0
    """Requests that were sent, those that failed as well."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    """As the server counts them; where it does not, a token for every four characters."""
    verdicts: int = 0
    cache_hits: int = 0
    """Completions whose verdict was there already, or was being asked for."""
    retries: int = 0
    rate_limited: int = 0
    """Times that the server asked to wait."""
    failures: int = 0
    """Completions without a verdict."""
    call_seconds: float = 0.0
    """In calls, added up over them."""
    waited_seconds: float = 0.0
    """From being handed over to the verdict, added up over the completions."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens


class VerdictStore:
    def __init__(self, path: Path | None, max_bytes: int) -> None:
        """Without a path it lives as long as the process."""
        self._path, self._max_bytes = path, max_bytes
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            # Written at once, and brought to the disk by the kernel: a kill loses nothing, a power cut the last ones.
            self._database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + TABLES)
            self._bytes = int(self._one("SELECT coalesce(sum(bytes), 0) FROM verdicts"))
            self.stats = self._read_stats()
        except sqlite3.OperationalError as error:
            raise _refused(error, path) from error
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): remove it, and verdicts are asked for again, with a budget that begins "
                "anew"
            ) from None

    def find(self, key: bytes) -> Points | None:
        found = self._database.execute("SELECT points FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else _points.decode(found[0])

    def keep(self, key: bytes, points: Points, reply: str) -> None:
        """With the cost so far; the oldest verdicts go when there are too many."""
        text = msgspec.json.encode(points).decode()
        reply = reply[-LONGEST:].encode(errors="replace").decode()
        size = len(text) + len(reply.encode()) + ENTRY_BYTES
        with self._writing():
            if size <= self._max_bytes:
                added = self._database.execute(
                    "INSERT OR IGNORE INTO verdicts (key, points, reply, bytes) VALUES (?, ?, ?, ?)",
                    (key, text, reply, size),
                )
                self._bytes += size * added.rowcount
                while self._bytes > self._max_bytes:
                    self._drop_oldest()
            self._write_stats()

    def note_cost(self) -> None:
        with self._writing():
            self._write_stats()

    def close(self) -> None:
        self._database.close()

    def _drop_oldest(self) -> None:
        number, size = self._database.execute("SELECT number, bytes FROM verdicts ORDER BY number LIMIT 1").fetchone()
        self._database.execute("DELETE FROM verdicts WHERE number = ?", (number,))
        self._bytes -= size

    def _read_stats(self) -> JudgeStats:
        found = self._database.execute("SELECT counters FROM cost").fetchone()
        return JudgeStats() if found is None else msgspec.json.decode(found[0], type=JudgeStats)

    def _write_stats(self) -> None:
        self._database.execute("REPLACE INTO cost VALUES (1, ?)", (msgspec.json.encode(self.stats).decode(),))

    def _one(self, query: str) -> int:
        return self._database.execute(query).fetchone()[0]

    @contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise _refused(error, self._path) from error


def _refused(error: sqlite3.Error, path: Path | None) -> StorageError:
    return StorageError(EIO, f"{error}; {WAY_OUT}", str(path))
