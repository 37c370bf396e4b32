"""What a run was computed with and on, found without importing anything heavy."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import asyncrl
from asyncrl.system import devices

PACKAGES = ("torch", "ray", "vllm", "transformers", "tokenizers", "pyarrow", "numpy")
GIT_SECONDS = 5.0


def environment() -> dict[str, str]:
    """Names and values to be read by people; nothing in it tells who or where."""
    found = {
        "asyncrl": _commit(asyncrl.__version__),
        "python": platform.python_version(),
        **{name: told for name in PACKAGES if (told := _version(name))},
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpus": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
    }
    if gpus := devices.gpu_count():
        memory = devices.gpu_memory()
        found["gpus"] = f"{gpus}" + (f" with {memory / 2**30:.0f} GiB" if memory else "")
    return found


def resident_bytes(pids: Mapping[str, int]) -> dict[str, int]:
    """Memory of processes of this machine by name; of those that share one the first. Empty where there is no /proc."""
    found: dict[str, int] = {}
    first = {pid: name for name, pid in reversed(list(pids.items()))}
    for pid, name in first.items():
        with suppress(OSError):
            found[name] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit(release: str) -> str:
    """The release, and the commit where it is run from a checkout."""
    root = Path(asyncrl.__file__).parents[1]
    if not (root / ".git").exists():
        return release
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release}, commit {told}"
