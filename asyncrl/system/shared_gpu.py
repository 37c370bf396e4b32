"""Several ranks of NCCL on one GPU: it refuses them before 2.30, and from then on unless a variable allows them."""

import ctypes
import os
from importlib.metadata import PackageNotFoundError, version

from asyncrl.errors import ConfigError
from asyncrl.system.minimum_versions import release

OLDEST = (2, 30)
VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""What torch brings with it."""


def installed() -> tuple[int, ...]:
    """Version of NCCL by its package; empty where it came another way."""
    for name in DISTRIBUTIONS:
        try:
            return release(version(name))
        except PackageNotFoundError:
            continue
    return ()


def numbers(code: int) -> tuple[int, ...]:
    """Of a version as NCCL tells it: 23007 -> (2, 30, 7)."""
    return code // 10_000, code // 100 % 100, code % 100


def loaded() -> tuple[int, ...]:
    """Version of the library that torch has loaded: it tells only which it was built with."""
    found = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    return numbers(found.value)


def problem(found: tuple[int, ...]) -> str:
    """Why ranks cannot share a GPU with this version of NCCL; empty where they can, or where it is not known."""
    if not found or found >= OLDEST:
        return ""
    return (
        f"placement.share_gpu=true needs NCCL {'.'.join(map(str, OLDEST))} or newer, and {'.'.join(map(str, found))} "
        f"is here: install a newer {DISTRIBUTIONS[0]}, or set placement.share_gpu=false with a GPU for each of "
        "trainer.ranks"
    )


def allow() -> None:
    """Before the ranks of this process join the others."""
    if why_not := problem(loaded()):
        raise ConfigError(why_not)
    os.environ[VARIABLE] = "1"
