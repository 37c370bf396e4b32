"""The run directory: where everything about a run lies, owner-only, every rewritten file replaced atomically."""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError

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
        self.drafter = path / "drafter"
        self.speculation = path / "speculation.json"

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

    def close_to_others(self) -> None:
        """Restore the mode that it was created with, wherever it was copied to since."""
        if self.path.stat().st_uid == os.geteuid():
            self.path.chmod(0o700)


def replace(path: Path, content: bytes) -> None:
    """Write beside the target and rename, so a reader sees the old file or the new one, never half of it."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)  # a link that somebody put there would be followed
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    scratch.replace(path)


class Events:
    """Spans and state changes, one JSON object a line, flushed at once: what is written survives kill -9."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)

    def write(self, kind: str, *, start: float | None = None, **fields: Any) -> None:
        """A span when `start` is given, which lasts until now; otherwise an instant."""
        now = time.time()
        event: dict[str, Any] = {"kind": kind, "time": start if start is not None else now}
        if start is not None:
            event["seconds"] = now - start
        self._file.write(msgspec.json.encode(event | fields) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every complete event; a line torn by a kill is left out."""
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            events.append(msgspec.json.decode(line))
        except msgspec.DecodeError:
            continue
    return events
