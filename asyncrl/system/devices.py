"""GPUs and CPU features of this machine, found without importing torch."""

import os
import subprocess
from pathlib import Path

from asyncrl.system import minimum_versions


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here and visible to this process."""
    return Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def gpu_count() -> int:
    """NVIDIA GPUs that are visible to this process."""
    if not has_gpu():
        return 0
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def gpu_memory() -> int | None:
    """Bytes of the first visible GPU, as the driver reports it; None without a GPU or a driver that answers."""
    if not has_gpu():
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return int(output.split()[0]) << 20


def mps_runs() -> bool:
    """Whether a CUDA MPS daemon listens here: the kernels of several processes then run side by side on a card."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def give_way() -> None:
    """Under MPS let the kernels of other processes go first; to be called before this one touches CUDA. Decoding is a
    sequence of small kernels, and each would wait behind a large one of training."""
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")  # below normal


def has_avx512() -> bool:
    info = Path("/proc/cpuinfo")  # psutil tells no CPU flags
    return info.exists() and "avx512f" in info.read_text()


def runs_vllm() -> bool:
    """Whether a GPU is here and a version of vLLM that we support."""
    return has_gpu() and minimum_versions.vllm_problem(minimum_versions.vllm_installed()) is None
