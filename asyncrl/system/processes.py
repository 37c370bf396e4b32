"""What can be learned of a process from outside, and of our own from inside. Nothing here waits without a limit."""

import faulthandler
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path

CLOCK_S = 2.0
"""Between the clock of processes and that of files."""
DUMP_SECONDS = 5.0
STATES = {"R": "computes", "S": "sleeps", "D": "waits for a device", "T": "stopped", "t": "stopped", "Z": "ended"}
"""Letters of /proc/PID/stat."""


@cache
def place() -> str:
    """Equal for two processes that see each other's /proc."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return platform.node()


def state(pid: int) -> str:
    """What the process does, or `` where that cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "ended" if Path("/proc/self").exists() else ""
    return STATES.get(stat.rpartition(")")[2].split()[0], "")


def is_still(pid: int, noted: float) -> bool:
    """Whether it is the process that was noted then, and no later one that got its number."""
    if state(pid) == "ended":
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except OSError:  # no Linux
        return True
    begun = int(boot.split()[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return begun <= noted + CLOCK_S


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
