"""How new weights reach the engines, as settings. No torch here: reading a config imports this."""

from typing import TYPE_CHECKING, Literal

from asyncrl.config.base import AboveZero, Settings
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Weights(Settings, frozen=True):
    """How new weights reach the engines, and what proves that they did."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "file"] = "auto"
    """`auto` is CUDA IPC where trainer and engine share a GPU, else shared memory. `nccl` broadcasts between GPUs;
    `file` needs a disk that all hosts see under the run's directory."""
    deadline_s: AboveZero = 120.0
    """A version that an engine has not loaded, and shown to compute right, after this is sent once more, then the run
    stops."""
    probe: bool = True
    """Compare log-probabilities after fixed prompts, between trainer and engine, before a version counts."""
    delta: bool = False
    """Send only the elements that changed, where that is less; for `nccl` and `file`."""


def check_weights(run: "Run") -> None:
    weights = run.weights
    if weights.delta and weights.transport not in ("nccl", "file"):
        raise ConfigError(
            f"weights.delta=true saves bytes that are sent, but with weights.transport={weights.transport} engines "
            "read the trainer's own memory; use weights.delta=false, or weights.transport=nccl or file"
        )
    if weights.transport not in ("cuda_ipc", "nccl"):
        return
    if run.trainer.device == "cpu" or (isinstance(run.engine, NativeEngine) and run.engine.device == "cpu"):
        raise ConfigError(
            f"weights.transport={weights.transport} is for trainer and engine on GPUs; use weights.transport=auto"
        )
    if weights.transport == "nccl" and isinstance(run.engine, VllmEngine) and run.engine.tensor_parallel > 1:
        raise ConfigError(
            f"weights.transport=nccl reaches one GPU of each engine, and engine.tensor_parallel="
            f"{run.engine.tensor_parallel}; use weights.transport=auto or file"
        )
