"""Whether torch.compile can work here, without importing torch."""

import shutil
import sysconfig
from importlib.util import find_spec

from asyncrl.errors import ConfigError

COMPILERS = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "cc", "clang")}
"""torch builds C++ for a CPU; Triton builds a launcher in C for every kernel."""


def missing_for_compiling(device: str) -> str:
    """In words, or nothing."""
    own = (sysconfig.get_config_var("CXX" if device == "cpu" else "CC") or "").split()[:1]
    if not any(shutil.which(name) for name in (*own, *COMPILERS[device])):
        return f"a compiler ({' or '.join(COMPILERS[device])}) on PATH"
    if device == "cuda" and find_spec("triton") is None:
        return "the package triton"
    return ""


def compiles(setting: str, device: str) -> bool:
    """What `trainer.compile` comes to: on a CPU it has to be asked for, as a small model gains nothing."""
    missing = missing_for_compiling(device)
    if setting == "on" and missing:
        raise ConfigError(f"trainer.compile=on needs {missing}; install it, or set trainer.compile=off")
    return setting == "on" or (setting == "auto" and device == "cuda" and not missing)
