"""Settings of the trainer, and what of them does not go together."""

from collections.abc import Collection
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
    targets: tuple[str, ...] = PROJECTIONS
    """The linear layers that change, by the last part of their Hugging Face names. These are what our own decoder has;
    other families may name theirs otherwise."""


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
    shorten_momentum: bool = True
    """Raise beta1 to the power 1 + a in a step whose samples are `a` versions old on average: what comes late is
    averaged over fewer steps. A synchronous run has a = 0."""
    grad_clip: AboveZero = 1.0
    token_budget: Positive = 8192
    """Tokens of one forward and backward of one rank."""
    ranks: Positive = 1
    """Processes that train together, each with a part of the weights and of every batch (FSDP2), on GPUs one a GPU."""
    replicas: Positive = 1
    """The ranks form so many groups, each with every weight once between its ranks (HSDP). Weights travel inside a
    group, and between the groups the gradient of a step. Divides `ranks`."""
    context_parallel: Positive | Literal["auto"] = 1
    """So many ranks compute each batch together, every one some of its tokens (Ulysses): for completions whose
    activations one GPU cannot hold. Divides `ranks`. `auto` chooses for each batch: as few ranks as its longest
    completion needs for at most `token_budget` tokens each."""
    expert_parallel: Positive = 1
    """So many ranks have every expert of a layer once between them, and tokens travel to those that have theirs; for
    mixtures of experts. Divides the ranks of a replica, which in turn divide the number of experts."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the computation; master weights are always fp32."""
    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which the gradients of several ranks are sent and added up. `auto` is fp32; bf16 sends half as many
    bytes, and rounds the gradient of every batch. What a rank adds up over the batches of a step is fp32 always."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Fuse the layers, the logits and the update with torch.compile. `auto` does it on a GPU where there is a C
    compiler; the first steps of a run then take up to a minute more. Layers of a model of transformers that cannot be
    compiled are left as they are with `auto`."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps a byte instead of four for each moment: 6 bytes less a parameter, and approximate."""
    offload: Literal["none", "optimizer"] = "none"
    """`optimizer` keeps the moments, and what bf16 weights lack of their fp32 masters, in the host's memory: 10 bytes
    less a parameter on the GPU, 4 with adamw_8bit. They visit the GPU at every update; the numbers are the same."""
    checkpoint_activations: bool | Positive | Literal["auto"] = "auto"
    """Keep only each layer's input for the backward and compute the rest again: a third more work, a fraction of the
    memory. A number does it in so many layers, `auto` in as many as the trainer's share of a GPU asks for."""
    logits_bytes: Positive = 1 << 30
    """Largest block of fp32 logits at a time; those of more tokens are made in chunks, and again in the backward."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the first GPU where there is one."""
    threads: Positive = 1
    profile_step: Natural = 0
    """Write what each rank does in this step to `profile/` of the run, for Perfetto; 0: in none. The step is slower."""
    lora: Lora = Lora()

    @property
    def ranks_per_replica(self) -> int:
        """That have every weight once between them."""
        return self.ranks // self.replicas

    @property
    def context_degrees(self) -> list[int]:
        """How many ranks may share a batch, in order."""
        if self.context_parallel == "auto":
            return [degree for degree in range(1, self.ranks + 1) if self.ranks % degree == 0]
        return [self.context_parallel]

    def context_of(self, tokens: int) -> int:
        """How many ranks share a batch with a completion of so many tokens, its prompt included."""
        return fewest_ranks(self.context_degrees, self.token_budget, tokens)


def fewest_ranks(degrees: Collection[int], token_budget: int, tokens: int) -> int:
    """The first of these degrees, which are in order, that leaves each rank at most `token_budget` of the tokens of a
    completion; the last, if none does."""
    return next((degree for degree in degrees if degree * token_budget >= tokens), max(degrees))


def check_targets(lora: Lora, known: Collection[str], model: str) -> None:
    """Refuse names of layers that the model has not."""
    if missing := [target for target in lora.targets if target not in known]:
        raise ConfigError(
            f"trainer.lora.targets names {', '.join(missing)}, and {model} has no such linear layers; set "
            f"trainer.lora.targets to some of {', '.join(sorted(known))}"
        )


def check_trainer(run: "Run") -> None:
    if run.trainer.ranks > 1 and run.cluster == "inprocess":
        raise ConfigError(
            f"trainer.ranks={run.trainer.ranks} are processes of their own, and cluster=inprocess has but one; use "
            "cluster=local, or trainer.ranks=1"
        )
    _check_degree(run, "replicas", "groups of ranks with all weights each")
    _check_degree(run, "context_parallel", "ranks that share a batch")
    _check_degree(run, "expert_parallel", "ranks that share the experts of a layer")
    _check_replicas(run.trainer)
    if run.trainer.context_degrees[-1] > 1 and "trainer" in run.hidden_states_from:
        able = "drafter.training.source=rollout" if run.engine.gives_hidden_states else "engine=native"
        ways = "trainer.context_parallel=1" if run.agent.on else f"{able}, or trainer.context_parallel=1"
        raise ConfigError(
            f"trainer.context_parallel={run.trainer.context_parallel} cuts completions, and drafter={run.drafter.kind} "
            f"learns from hidden states of whole ones in the trainer; set {ways}"
        )
    changing = run.trainer.warmup_steps + run.trainer.decay_steps
    if run.trainer.decay_steps and changing > run.steps:
        raise ConfigError(
            f"trainer.warmup_steps={run.trainer.warmup_steps} and trainer.decay_steps={run.trainer.decay_steps} do not "
            f"fit into steps={run.steps}; lower one of them, or raise steps"
        )
    for name, value, plain in (
        ("optimizer", run.trainer.optimizer, "adamw"),
        ("offload", run.trainer.offload, "none"),
    ):
        if value != plain and run.trainer.ranks > 1:
            raise ConfigError(
                f"trainer.{name}={value} is for one rank; with trainer.ranks={run.trainer.ranks} each holds a part of "
                f"the optimizer: set trainer.{name}={plain}, or trainer.ranks=1"
            )
    if run.trainer.offload != "none" and run.trainer.device == "cpu":
        raise ConfigError(
            f"trainer.offload={run.trainer.offload} keeps state out of a GPU's memory, and trainer.device=cpu uses "
            "none; set trainer.offload=none"
        )
    if run.trainer.lora.rank and not run.trainer.lora.targets:
        raise ConfigError("trainer.lora.targets=[] leaves nothing to train; name some, or set trainer.lora.rank=0")


def _check_degree(run: "Run", name: str, what: str) -> None:
    degree = getattr(run.trainer, name)
    if degree == 1:
        return
    if degree != "auto" and (ranks := run.trainer.ranks) % degree:
        raise ConfigError(
            f"trainer.{name}={degree} is the number of {what}, and does not divide trainer.ranks={ranks}; set "
            f"trainer.ranks={-(-ranks // degree) * degree}, or trainer.{name}=1"
        )
    if run.model.backend == "transformers" and name != "replicas":
        raise ConfigError(
            f"trainer.{name}={degree} needs our own decoder, and model.backend=transformers is chosen; set "
            f"trainer.{name}=1"
        )


def _check_replicas(trainer: Trainer) -> None:
    experts, each = trainer.expert_parallel, trainer.ranks_per_replica
    if each % experts:
        ranks = trainer.replicas * -(-each // experts) * experts
        raise ConfigError(
            f"trainer.expert_parallel={experts} does not divide the ranks of a replica, of which trainer.ranks="
            f"{trainer.ranks} and trainer.replicas={trainer.replicas} make {each}; set trainer.ranks={ranks}, or "
            "trainer.replicas=1"
        )
