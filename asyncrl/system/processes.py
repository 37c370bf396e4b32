"""The state, memory and Python stacks of processes. Nothing here waits without a limit."""

import faulthandler
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

CLOCK_S = 2.0
"""Tolerance between the start time of a process and the modification time of a file."""
DUMP_SECONDS = 5.0
STATES = {
    psutil.STATUS_RUNNING: "computes",
    psutil.STATUS_SLEEPING: "sleeps",
    psutil.STATUS_DISK_SLEEP: "waits for a device",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_ZOMBIE: "ended",
    psutil.STATUS_DEAD: "ended",
}
CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where a container's memory limit, its use and the part of it that is cached files are read: cgroups 2, then 1."""


def available_memory() -> int:
    """Bytes that can be allocated without swapping, here and within the limit of the container."""
    return min([psutil.virtual_memory().available, *_left_in_container(Path("/sys/fs/cgroup"))])


def _left_in_container(root: Path) -> Iterator[int]:
    for folder, limit, usage, cached in CGROUPS:
        with suppress(OSError, ValueError, KeyError):  # another version of cgroups, or `max`: no limit
            most, used = (int((root / folder / name).read_text()) for name in (limit, usage))
            parts = dict(line.split() for line in (root / folder / "memory.stat").read_text().splitlines())
            yield max(most - used + int(parts[cached]), 0)


@cache
def place() -> str:
    """The machine and its PID namespace, which psutil does not know: equal for processes that see each other's pids."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return platform.node()


def state(pid: int) -> str:
    """What the process does, or `` where that cannot be seen."""
    try:
        return STATES.get(psutil.Process(pid).status(), "")
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.AccessDenied:
        return ""


def is_still(pid: int, noted: float) -> bool:
    """Whether it is the process whose pid was written down at time `noted`, and not a later one with the same pid."""
    if state(pid) == "ended":
        return False
    try:
        return psutil.Process(pid).create_time() <= noted + CLOCK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def resident_bytes(pids: Mapping[str, int]) -> dict[str, int]:
    """Resident memory of processes of this machine, by name; a process with several names counts for the first."""
    memory: dict[str, int] = {}
    first = {pid: name for name, pid in reversed(list(pids.items()))}
    for pid, name in first.items():
        with suppress(psutil.Error):  # it has ended, or runs on another machine
            memory[name] = psutil.Process(pid).memory_info().rss
    return memory


def stack_from_outside(pid: int) -> str:
    """Its Python stack by py-spy, which also reads stopped processes; a sentence in brackets where it cannot."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return "(py-spy is not installed)"
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=DUMP_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"(py-spy had read nothing after {DUMP_SECONDS:g} s)"
    if done.returncode:
        return f"(py-spy was refused: {' '.join(done.stderr.split())[:300]})"
    return done.stdout


def stacks_from_inside() -> str:
    """Every thread of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def main_thread_at() -> str:
    """Where the main thread of this process is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return ""
    last = traceback.extract_stack(frame)[-1]
    return f"{last.name} ({last.filename}:{last.lineno})"
