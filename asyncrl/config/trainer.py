"""Settings of the trainer, and what of them does not go together."""

from typing import TYPE_CHECKING, Literal

from asyncrl.config.base import AboveZero, Natural, NonNegative, Positive, Probability, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(Settings, frozen=True):
    """Train low-rank changes to matrices instead of all weights."""

    rank: Natural = 0
    """Of the changes; 0 trains every weight."""
    alpha: AboveZero = 32.0
    """The change is multiplied by alpha / rank."""
    targets: tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...] = (
        PROJECTIONS
    )
    """The matrices that change, by their Hugging Face names."""


class Trainer(Settings, frozen=True):
    """The optimizer and its batches."""

    lr: AboveZero = 1e-6
    warmup_steps: Natural = 0
    """The first steps, over which the learning rate grows to `lr`."""
    decay_steps: Natural = 0
    """The last steps, over which it falls towards zero; `steps` says which these are."""
    weight_decay: NonNegative = 0.0
    beta1: Probability = 0.9
    beta2: Probability = 0.99
    grad_clip: AboveZero = 1.0
    token_budget: Positive = 8192
    """Tokens of one forward and backward of one rank."""
    ranks: Positive = 1
    """Processes that train together, each with a part of the weights and of every batch (FSDP2), on GPUs one a GPU."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the computation; master weights are always fp32."""
    checkpoint_activations: bool | Literal["auto"] = "auto"
    """Keep only each layer's input for the backward and compute the rest again: a third more work, a fraction of the
    memory. `auto` does it on a GPU whose share for the trainer would not hold everything."""
    logits_bytes: Positive = 1 << 30
    """Largest block of fp32 logits at a time; those of more tokens are made in chunks, and again in the backward."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the first GPU where there is one."""
    threads: Positive = 1
    lora: Lora = Lora()


def check_trainer(run: "Run") -> None:
    if run.trainer.ranks > 1 and run.cluster == "inprocess":
        raise ConfigError(
            f"trainer.ranks={run.trainer.ranks} are processes of their own, and cluster=inprocess has but one; use "
            "cluster=local, or trainer.ranks=1"
        )
    changing = run.trainer.warmup_steps + run.trainer.decay_steps
    if run.trainer.decay_steps and changing > run.steps:
        raise ConfigError(
            f"trainer.warmup_steps={run.trainer.warmup_steps} and trainer.decay_steps={run.trainer.decay_steps} do not "
            f"fit into steps={run.steps}; lower one of them, or raise steps"
        )
    if run.trainer.lora.rank and not run.trainer.lora.targets:
        raise ConfigError("trainer.lora.targets=[] leaves nothing to train; name some, or set trainer.lora.rank=0")
