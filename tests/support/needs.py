"""Why a test is skipped, in one form, of which the last line of a test run makes a sum: `needs WHAT: HOW TO GET IT`."""

import shutil
from collections import Counter
from collections.abc import Iterable

from asyncrl.errors import SandboxError
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.system.shared_gpu import OLDEST

GPU = "needs a GPU: make test-gpu"
NO_MPS = "needs CUDA MPS to be off, as a killed process takes others with it: echo quit | nvidia-cuda-mps-control"
VLLM = "needs vLLM: make test installs it"
SSH = "needs an SSH server and rsync: apt-get install openssh-server rsync"
NAMESPACES = "needs namespaces: a machine or container that allows unshare --pid --net"


def package(name: str) -> str:
    return f"needs asyncrl[{name}]: pip install 'asyncrl[{name}]'"


def shared_gpu(nccl: tuple[int, ...]) -> str:
    """Why this version of NCCL does not let ranks share a GPU, or nothing."""
    return "" if nccl >= OLDEST else f"needs NCCL 2.30, not {'.'.join(map(str, nccl))}: several ranks on one GPU"


def bubblewrap() -> str:
    """Why programs cannot be contained here, or nothing."""
    try:
        Sandbox()
    except SandboxError as error:
        missing = shutil.which("bwrap") is None
        return "needs bubblewrap: apt-get install bubblewrap" if missing else f"needs user namespaces: {error}"
    return ""


def total(reasons: Iterable[str]) -> str:
    """`5 skipped: 3 need bubblewrap (apt-get install bubblewrap), 2 need a GPU (make test-gpu)`; nothing for none."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    by_count = sorted(counts.items(), key=lambda found: (-found[1], found[0]))
    parts = [_part(reason, count) for reason, count in by_count]
    return f"{counts.total()} skipped: {', '.join(parts)}" if parts else ""


def _part(reason: str, count: int) -> str:
    what, colon, how = reason.partition(": ")
    if not colon or not what.startswith("needs "):
        return f"{count} ({reason})"
    return f"{count} {'needs' if count == 1 else 'need'} {what.removeprefix('needs ')} ({how})"
