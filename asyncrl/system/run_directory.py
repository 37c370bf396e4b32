"""The run directory: where everything about a run lies, owner-only, every rewritten file replaced atomically."""

import fcntl
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.system.storage import storing, sync

OWNER_ONLY = 0o077
"""The umask of every process of a run: completions, rewards and weights are private."""


@contextmanager
def owner_only() -> Generator[None, None, None]:
    """What is created inside, by whatever library, is readable by its owner alone."""
    before = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(before)


class RunDirectory:
    """Paths of one run. Nothing in it is named after data that came from a model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.earlier_settings = path / "earlier_settings"
        self.summary = path / "summary.json"
        self.metrics = path / "metrics.parquet"
        self.events = path / "events.jsonl"
        self.actors = path / "actors.json"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.best = path / "best"
        self.drafter = path / "drafter"
        self.profile = path / "profile"
        self.speculation = path / "speculation.json"
        self.judge = path / "judge.sqlite"

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        if path.exists():
            raise ConfigError(
                f"{path} exists already: continue it with `asyncrl resume {path}`, or give the new run another name=..."
            )
        path.mkdir(parents=True, mode=0o700)
        path.chmod(0o700)  # mkdir's mode is cut by the umask of parents that it creates
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is not a run directory: it has no config.yaml; name one such as runs/my-run")
        return cls(path)

    @contextmanager
    def in_use(self) -> Generator[None, None, None]:
        """By this process alone; the kernel lets go of it even after kill -9."""
        handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(
                f"{self.path} is in use by another process: wait until that run has ended, or end it with SIGTERM"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def read_summary(self) -> dict[str, Any] | None:
        """None if there is none, or none that can be read: every attempt writes a new one."""
        try:
            return msgspec.json.decode(self.summary.read_bytes(), type=dict[str, Any])
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def close_to_others(self) -> None:
        """Restore the mode that it was created with, wherever it was copied to since."""
        if self.path.stat().st_uid == os.geteuid():
            self.path.chmod(0o700)


def replace(path: Path, content: bytes) -> None:
    """Write beside the target and rename, so a reader sees the old file or the new one, never half of it. Synced, the
    file before its new name: without it a machine that loses its power leaves an empty file."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)  # a link that somebody put there would be followed
    with storing(path):
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        scratch.replace(path)
        sync(path.parent)


EVERY_STEP = frozenset(
    ("wait_batch", "train", "wait_sync", "update", "publish", "checkpoint", "checkpoint_written", "off_policy")
)
"""Kinds of events that a run writes again and again; of these, old ones may go."""


class Events:
    """Spans and state changes, one JSON object a line, flushed at once: what is written survives kill -9.

    Above `max_bytes` the file is replaced by one without the older half of the events of `EVERY_STEP`. All others stay,
    unless they alone take half of it: then the oldest go, too.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._open()

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._size = os.fstat(descriptor).st_size
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":  # a line that a kill tore
            self._put(b"\n")

    def write(self, kind: str, *, start: float | None = None, **fields: Any) -> None:
        """A span when `start` is given, which lasts until now; otherwise an instant."""
        now = time.time()
        event: dict[str, Any] = {"kind": kind, "time": start if start is not None else now}
        if start is not None:
            event["seconds"] = now - start
        self._put(msgspec.json.encode(event | fields) + b"\n")
        if self._size > self._max_bytes:
            self._thin()

    def _put(self, line: bytes) -> None:
        self._size += len(line)
        with storing(self._path):
            while line:  # a disk that is nearly full takes a part, and gives its reason at the next try
                line = line[self._file.write(line) :]

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        often = [_kind(line) in EVERY_STEP for line in lines]
        kept = _newest(lines, [not each for each in often], self._max_bytes // 2)
        kept |= _newest(lines, often, self._max_bytes // 2 - sum(len(lines[i]) for i in kept))
        gone = {"kind": "events_pruned", "time": time.time(), "lines": len(lines) - len(kept)}
        replace(self._path, b"".join([*(lines[i] for i in sorted(kept)), msgspec.json.encode(gone) + b"\n"]))
        self._file.close()
        self._open()

    def close(self) -> None:
        self._file.close()


def _newest(lines: Sequence[bytes], wanted: Sequence[bool], most: int) -> set[int]:
    """Which of the wanted lines to keep, so that they have at most so many bytes."""
    kept: set[int] = set()
    for number in range(len(lines) - 1, -1, -1):
        if wanted[number]:
            most -= len(lines[number])
            if most < 0:
                break
            kept.add(number)
    return kept


def _kind(line: bytes) -> str:
    """Of an event; it is the first field."""
    return line[: line.find(b",")].removeprefix(b'{"kind":"').rstrip(b'"').decode(errors="replace")


def read_events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Every complete event, or those of some kinds, which is faster than to decode all; a line torn by a kill is left
    out."""
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in file:
            if kinds and _kind(line) not in kinds:
                continue
            try:
                events.append(msgspec.json.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return events
