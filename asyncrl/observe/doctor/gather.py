"""Collects the facts about this machine that `checks` judges: packages, GPUs, memory, disk, ports, sandbox, leftovers.

Nothing here changes anything, except for a small file that is written and removed again.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

import msgspec
import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import asyncrl
from asyncrl.errors import SandboxError
from asyncrl.observe.doctor.facts import Cuda, Disk, Facts, Gpu, Leftovers
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.system import minimum_versions, ownership
from asyncrl.system.devices import gpu_count, mps_runs
from asyncrl.system.scratch_dirs import has_owner

SHARED_MEMORY = Path("/dev/shm")
HEAD_PORTS = (6379, 8265, 10001)
"""Of `ray start --head`: its address, dashboard and client port."""
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
RAYS = re.compile(r"/(gcs_server|raylet) ")
CUDA_SECONDS = 60.0
"""Time to import packages of a gigabyte, perhaps over a network."""
CUDA_PROBE = """
import json
found = {}
try:
    import torch
    found |= {"torch": torch.version.cuda or "", "works": torch.cuda.is_available()}
    import cupy
    from cupy.cuda import nccl
    found["nccl"] = str(nccl.get_version())
    cupy.cuda.runtime.ipcGetMemHandle(cupy.cuda.Memory(1 << 20).ptr)
    found["ipc"] = True
except Exception:
    pass
print(json.dumps(found))
"""
"""Stops at the first failure; the fields that are still at their defaults say what is missing."""


def gather(root: Path) -> Facts:
    """`root` is where runs are written."""
    devices = gpu_count()
    return Facts(
        python=sys.version_info[:3],
        packages={canonicalize_name(found.name): found.version for found in distributions()},
        requirements=dict(_requirements()),
        vllm=minimum_versions.vllm_installed(),
        gpu_devices=devices,
        gpus=gpus() if devices else (),
        cuda=cuda() if devices else None,
        mps=mps_runs(),
        memory=psutil.virtual_memory().available,
        shared_memory=_shared_memory(),
        disk=_disk(root),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        loopback=_can_bind(0),
        taken_ports=tuple(port for port in HEAD_PORTS if not _can_bind(port)),
        bubblewrap=shutil.which("bwrap") is not None,
        sandbox=_sandbox(),
        py_spy=bool(shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))),
        ptrace_scope=int(PTRACE_SCOPE.read_text()) if PTRACE_SCOPE.exists() else 0,
        root=os.geteuid() == 0,
        now=time.time(),
        newest_file=max(path.stat().st_mtime for path in Path(asyncrl.__file__).parent.glob("*.py")),
        leftovers=leftovers(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())),
    )


def _requirements() -> Iterator[tuple[str, str]]:
    """Of the core, without extras: `ray<2.62,>=2.59` -> ray, <2.62,>=2.59."""
    try:
        listed = requires("asyncrl") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return
    for requirement in map(Requirement, listed):
        if requirement.marker is None:
            yield canonicalize_name(requirement.name), str(requirement.specifier)


def _shared_memory() -> tuple[int, int] | None:
    if not SHARED_MEMORY.is_dir():
        return None
    found = shutil.disk_usage(SHARED_MEMORY)
    return found.total, found.free


def _disk(root: Path) -> Disk:
    place = next(place for place in (root.resolve(), *root.resolve().parents) if place.is_dir())
    disk = Disk(directory=str(place), free=shutil.disk_usage(place).free)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".asyncrl-doctor-") as file:
            file.write(b"doctor")
            file.flush()
            begun = time.monotonic()
            taken = _fsync(file.fileno(), begun)
            ahead = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:
        return Disk(directory=disk.directory, free=disk.free, writable=False)
    return Disk(directory=disk.directory, free=disk.free, fsync_s=taken, ahead_s=ahead)


def _fsync(descriptor: int, begun: float) -> float | None:
    try:
        os.fsync(descriptor)
    except OSError:
        return None
    return time.monotonic() - begun


def _can_bind(port: int) -> bool:
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _sandbox() -> str:
    try:
        Sandbox()
    except SandboxError as error:
        return str(error)
    return ""


def gpus() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines()]
    return tuple(Gpu(name=name, driver=driver, memory=int(memory) << 20) for name, driver, memory in rows)


def cuda() -> Cuda:
    """What torch and cupy can do, asked in a process of its own: importing them here would be heavy."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", CUDA_PROBE], capture_output=True, text=True, timeout=CUDA_SECONDS, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cuda)
    except (subprocess.SubprocessError, IndexError, msgspec.DecodeError):
        return Cuda()


def leftovers(home: Path) -> Leftovers:
    """What ended runs left behind: processes without a driver, and directories with logs. `home` is where the
    directories of our own Rays are made."""
    ended = [path for path in home.glob("asyncrl-*") if path.is_dir() and not has_owner(path)]
    kept = [path for path in ended if (path / "ray").is_dir() and path.stat().st_uid == os.geteuid()]
    rays = [pid for pid, words in _rays() if any(f"{path}/" in words for path in ended)]
    return Leftovers(
        processes=tuple(sorted({*rays, *(process.pid for process in ownership.left_behind())})),
        directories=tuple(sorted(map(str, kept))),
        bytes=sum(map(_size, kept)),
    )


def _rays() -> list[tuple[int, str]]:
    """Pids and command lines."""
    listed = [(process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"])]
    return [(pid, words) for pid, words in listed if RAYS.search(words)]


def _size(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
