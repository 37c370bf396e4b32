"""The GPUs, as their driver and as torch and cupy see them."""

import subprocess
import sys

import msgspec

from asyncrl.doctor.facts import Cuda, Gpu

ANSWER_S = 60.0
"""For packages of a gigabyte to be imported, perhaps over a network."""
QUESTION = """
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
"""What fails is left at its default: how far it got says what is missing."""


def gpus() -> tuple[Gpu, ...]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
    return tuple(Gpu(name=name, driver=driver, memory=int(memory) << 20) for name, driver, memory in rows)


def ask() -> Cuda:
    try:
        done = subprocess.run(
            [sys.executable, "-c", QUESTION], capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cuda)
    except (subprocess.SubprocessError, IndexError, msgspec.DecodeError):
        return Cuda()
