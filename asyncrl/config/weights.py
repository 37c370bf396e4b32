"""How new weights reach the engines, as settings.

A new transport is its name in `TransportName`, a line in `TRANSPORTS` here, and a file with a line in
`asyncrl.weights.transports.registry`. No torch here: reading a config imports this.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncrl.config.base import AboveZero, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run

TransportName = Literal["shared_memory", "cuda_ipc", "nccl", "file"]


class TransportTraits(NamedTuple):
    """What can be said of a transport without loading it."""

    needs_gpus: bool = False
    """Trainer and engines have to be on GPUs, and cupy installed."""
    takes_deltas: bool = False
    """Bytes are sent, so that fewer of them are sent faster; elsewhere engines read the trainer's memory."""
    one_gpu_per_engine: bool = False
    """It reaches one GPU of each engine."""


TRANSPORTS: dict[TransportName, TransportTraits] = {
    "shared_memory": TransportTraits(),
    "cuda_ipc": TransportTraits(needs_gpus=True),
    "nccl": TransportTraits(needs_gpus=True, takes_deltas=True, one_gpu_per_engine=True),
    "file": TransportTraits(takes_deltas=True),
}


class Weights(Settings, frozen=True):
    """How new weights reach the engines, and what proves that they did."""

    transport: Literal["auto", TransportName] = "auto"
    """`auto` is CUDA IPC where trainer and engine share a GPU, else shared memory. `nccl` broadcasts between GPUs;
    `file` needs a disk that all hosts see under the run's directory."""
    deadline_s: AboveZero = 120.0
    """A version that an engine has not loaded, and shown to compute right, after this is sent once more, then the run
    stops."""
    probe: bool = True
    """Compare log-probabilities after fixed prompts, between trainer and engine, before a version counts."""
    delta: bool = False
    """Send only the elements that changed, where that is less; for `nccl` and `file`."""

    @property
    def traits(self) -> TransportTraits:
        """Of `auto`, which is one that maps memory, nothing is known yet."""
        return TransportTraits() if self.transport == "auto" else TRANSPORTS[self.transport]


def published_adapters(run: "Run") -> tuple[str, ...]:
    """The projections of which only adapters are sent, and engines have the rest; none where whole weights are."""
    lora = run.trainer.lora
    return lora.targets if lora.rank and run.engine.merges_adapters else ()


def check_weights(run: "Run") -> None:
    weights, traits = run.weights, run.weights.traits
    if weights.delta and not traits.takes_deltas:
        able = " or ".join(name for name, each in TRANSPORTS.items() if each.takes_deltas)
        raise ConfigError(
            f"weights.delta=true saves bytes that are sent, but with weights.transport={weights.transport} engines "
            f"read the trainer's own memory; use weights.delta=false, or weights.transport={able}"
        )
    on_cpu = run.trainer.device == "cpu" or (run.engine.has_model and not run.engine.may_use_gpu)
    if traits.needs_gpus and on_cpu:
        raise ConfigError(
            f"weights.transport={weights.transport} is for trainer and engine on GPUs; use weights.transport=auto"
        )
    if traits.one_gpu_per_engine and run.engine.gpus > 1:
        raise ConfigError(
            f"weights.transport={weights.transport} reaches one GPU of each engine, and engine.tensor_parallel="
            f"{run.engine.gpus}; use weights.transport=auto or file"
        )
