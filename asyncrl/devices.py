"""What this machine has, found without importing torch."""

import os
from pathlib import Path
from typing import Literal

from asyncrl.engines.vllm import versions


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here and visible to this process."""
    return Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def has_avx512() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "avx512f" in info.read_text()


def default_engine() -> Literal["native", "vllm"]:
    """vLLM where it pays and can run, else our own."""
    return "vllm" if has_gpu() and versions.problem(versions.installed()) is None else "native"
