"""Verdicts, what they have cost, and completions that wait to be compared, in one SQLite file of the run's directory
that survives kill -9.

sqlite3 runs/NAME/judge.sqlite "SELECT points, reply FROM verdicts"
"""

import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from errno import EIO
from pathlib import Path

import msgspec

from asyncrl.errors import CheckpointError, StorageError
from asyncrl.judges.form import Points
from asyncrl.system.storage import WAY_OUT
from asyncrl.types import Slot
from asyncrl.user_code.protocol import RewardInput

LONGEST = 4000
"""Characters of a reply that are kept, the last ones."""
ENTRY_BYTES = 100
"""Of an entry, beside its texts."""
TABLES = """
CREATE TABLE IF NOT EXISTS verdicts
    (number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, points TEXT NOT NULL, reply TEXT NOT NULL, bytes INTEGER);
CREATE TABLE IF NOT EXISTS cost (one INTEGER PRIMARY KEY CHECK (one = 1), counters TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parked
    (group_id INTEGER, sample INTEGER, given TEXT NOT NULL, trajectory BLOB NOT NULL, PRIMARY KEY (group_id, sample));
"""
_points = msgspec.json.Decoder(Points)
_given = msgspec.json.Decoder(RewardInput)


class Parked(msgspec.Struct, frozen=True, array_like=True):
    """A finished completion that waits until it is compared with others of its group."""

    slot: Slot
    given: RewardInput
    """What the judge reads of it."""
    trajectory: bytes
    """As the buffer will have it, with the reward of the function."""


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
    compared: int = 0
    """Pairs of completions with a verdict in both orders."""
    by_place: int = 0
    """Of these, those in which the judge preferred the same place, first or second, in both orders for some item."""
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

    def park(self, completions: Sequence[Parked]) -> None:
        """Keep them until `forget`. The first of a slot stays."""
        rows = [
            (each.slot.group, each.slot.sample, msgspec.json.encode(each.given).decode(), each.trajectory)
            for each in completions
        ]
        with self._writing():
            self._database.executemany("INSERT OR IGNORE INTO parked VALUES (?, ?, ?, ?)", rows)

    def parked(self) -> list[tuple[Slot, RewardInput]]:
        rows = self._database.execute("SELECT group_id, sample, given FROM parked ORDER BY group_id, sample")
        return [(Slot(group, sample), _given.decode(given)) for group, sample, given in rows]

    def trajectory(self, slot: Slot) -> bytes:
        query = "SELECT trajectory FROM parked WHERE group_id = ? AND sample = ?"
        return self._database.execute(query, (slot.group, slot.sample)).fetchone()[0]

    def forget(self, group: int) -> None:
        """Nothing of it is compared any more."""
        with self._writing():
            self._database.execute("DELETE FROM parked WHERE group_id = ?", (group,))

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
