"""What the host sees of a sandbox: its processes and their memory."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

PAGE = os.sysconf("SC_PAGE_SIZE")


def processes_called(marker: str) -> list[int]:
    """Those whose command line begins with `marker`; the dead have none."""
    return [pid for pid in _pids() if _command(pid).startswith(marker)]


def alive(pid: int) -> bool:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def descendants(root: int) -> list[int]:
    """Of any depth, the dead aside."""
    parents: dict[int, int] = {}
    for pid in _pids():
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields and fields[0] != "Z":
            parents[pid] = int(fields[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


class Watch:
    """The most processes, and the most resident memory, below this process while it watches."""

    def __init__(self) -> None:
        self._before = set(descendants(os.getpid()))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.processes = 0
        self.resident_bytes = 0
        self.commands: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._done.set()
        self._thread.join()
        self.left = self._now()

    def _now(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in self._before]

    def _look(self) -> None:
        while not self._done.wait(0.01):
            pids = self._now()
            resident = [int((_read(f"/proc/{pid}/statm").split() or ["0", "0"])[1]) for pid in pids]
            self.commands |= {_command(pid) for pid in pids}
            self.processes = max(self.processes, len(pids))
            self.resident_bytes = max(self.resident_bytes, PAGE * sum(resident))


def wait_until(condition: Callable[[], bool]) -> None:
    """Pytest's own time limit ends a wait that would not."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.02)


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
