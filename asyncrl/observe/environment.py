"""Versions and hardware that a run was computed with. Imports nothing heavy."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import asyncrl
from asyncrl.system import devices

PACKAGES = ("torch", "ray", "vllm", "transformers", "tokenizers", "pyarrow", "numpy")
GIT_SECONDS = 5.0


def environment() -> dict[str, str]:
    """Names and values for people to read; nothing in it identifies the user or the machine."""
    shown = {
        "asyncrl": _commit(asyncrl.__version__),
        "python": platform.python_version(),
        **{name: installed for name in PACKAGES if (installed := _version(name))},
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpus": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
    }
    if gpus := devices.gpu_count():
        memory = devices.gpu_memory()
        shown["gpus"] = f"{gpus}" + (f" with {memory / 2**30:.0f} GiB" if memory else "")
        shown["cuda mps"] = (
            "on: processes share a card" if devices.mps_runs() else "off: processes take turns on a card"
        )
    return shown


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit(release: str) -> str:
    """The release, with the commit when run from a checkout."""
    root = Path(asyncrl.__file__).parents[1]
    if not (root / ".git").exists():
        return release
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release}, commit {commit}"
