"""What a run will need, by arithmetic alone: no model is loaded, and neither torch nor Ray is imported."""

from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from asyncrl.config import Run
from asyncrl.config.precision import numerics
from asyncrl.config.weights import published_adapters
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.drafting.memory import DrafterMemory, drafter_memory
from asyncrl.errors import CheckpointError, MissingDependencyError
from asyncrl.models.architectures import architecture
from asyncrl.models.config import ModelConfig, read_config, warm_start_shape
from asyncrl.models.routes import replayed_shape
from asyncrl.precision.memory import Footprint, footprint, with_base
from asyncrl.simulation.outcome import Rates
from asyncrl.system.compiler import compiles
from asyncrl.system.devices import gpu_count, gpu_memory, has_gpu
from asyncrl.tasks.base import Bounded, Listed, Mixed, Split, Task
from asyncrl.tasks.chains import CHARACTERS
from asyncrl.tasks.registry import make_task
from asyncrl.training.memory import (
    VERSIONS,
    Batch,
    engine_share,
    parameters,
    published_bytes,
    recomputed_layers,
    training_memory,
)
from asyncrl.types import Prompt
from pipelines.plan.disk import checkpoint_bytes

TOKEN = 3 * 4
"""Bytes of a token in a trajectory without routes: id, log-probability, policy version."""
ROW = 2048
"""Bytes of a trajectory besides its tokens, rounded up."""
PROCESS = 300 << 20
"""A process that has imported torch."""
CUDA = 600 << 20
"""A CUDA context with the kernels that training loads."""
PROMPTS_READ = 256
"""Prompts whose length is measured when the task does not bound it."""
LISTED_READ = 4096
"""The same of a list, whose prompts are all there."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, each for one process, at the largest sizes that the settings allow."""

    parameters: int
    published: int
    """Weights of one policy version on their way to the engines."""
    optimizer: int
    """The trainer's weights in every form, their gradients and Adam's moments."""
    activations: int
    """What the largest forward and backward adds to them, logits included."""
    recomputed: int
    """Layers whose activations are computed again in the backward instead of kept."""
    layers: int
    offloaded: int = 0
    """The optimizer's in the host's memory, with trainer.offload."""
    engine_weights: int
    engine_base: int = 0
    """What the engine merges adapters into."""
    kv_cache: int
    drafter: DrafterMemory = DrafterMemory()
    """Of one that learns."""
    token: int
    """In a trajectory."""
    trajectories: int
    """One step's samples, every completion as long as it may be."""
    teachers_on_card: int = 0
    """Weights of those that compute on a GPU."""
    teachers_in_host: int = 0
    """Weights and processes of the others."""
    checkpoint: int
    """One, complete."""

    @property
    def training(self) -> int:
        """What `trainer_peak_memory_bytes` in summary.json should come to on a GPU."""
        return self.optimizer + self.activations

    @property
    def trainer(self) -> int:
        return self.training + PROCESS

    @property
    def rollout(self) -> int:
        return self.engine_weights + self.engine_base + self.kv_cache + PROCESS

    def host(self, run: Run) -> int:
        """Everything on one machine that lies in its own memory; published weights are there in shared memory."""
        trainer = PROCESS + self.offloaded if trains_on_gpu(run) else self.trainer
        rollout = PROCESS if has_gpu() and engine_share(run) else self.rollout
        others = self.teachers_in_host + self.host_drafter(run) + self.shared_memory(run)
        return trainer + run.engines * rollout + others

    def host_drafter(self, run: Run) -> int:
        """It computes where the trainer does."""
        if not run.drafter.trains:
            return 0
        return PROCESS + self.drafter.hidden_states + (0 if trains_on_gpu(run) else self.drafter.computed)

    def shared_memory(self, run: Run) -> int:
        """Of the machine, for weights on their way; `auto` sends them over the card where all are on one."""
        on_card = trains_on_gpu(run) and engine_share(run) > 0
        used = run.weights.transport == "shared_memory" or (run.weights.transport == "auto" and not on_card)
        return VERSIONS * ((self.published if used else 0) + self.drafter.published)


class Card(NamedTuple):
    """Bytes on the GPU that trainer, engines and teachers share."""

    total: int
    trainer: int
    """With a drafter that learns."""
    engines: int
    teachers: int = 0


class Traffic(NamedTuple):
    """Bytes over each edge: per second where the pace is known, else per step at the longest completions."""

    to_buffer: float
    to_trainer: float
    to_engines: float
    """Of all engines together."""
    per: Literal["a step", "a second"]

    def words(self, count: float) -> str:
        return f"about {size(count)}" if self.per == "a second" else f"at most {size(count)}"


def traffic(run: Run, required: Needs, prompt: int, pace: Rates | None) -> Traffic:
    """`pace` comes from a simulation; `prompt` is the length of the longest, in tokens."""
    weights = run.rollout.replicas * required.published
    if pace is None:
        return Traffic(required.trajectories, required.trajectories, weights, "a step")
    rows = pace.samples_per_second * (prompt * required.token + ROW)
    generated, trained = (
        required.token * tokens for tokens in (pace.generated_tokens_per_second, pace.tokens_per_second)
    )
    return Traffic(rows + generated, rows + trained, weights / pace.step_seconds, "a second")


def trains_on_gpu(run: Run) -> bool:
    return run.trainer.device == "cuda" or (run.trainer.device == "auto" and has_gpu())


def card(run: Run, required: Needs) -> Card | None:
    """None without a GPU here, or where nothing of the run is on it."""
    total = gpu_memory()
    if total is None or not (trains_on_gpu(run) or engine_share(run) or required.teachers_on_card):
        return None
    trainer = drafter = 0
    if trains_on_gpu(run):
        together = -(-run.trainer.ranks // max(1, gpu_count())) if run.shares_gpu else 1
        trainer = together * (required.training + CUDA) + VERSIONS * required.published
        drafter = required.drafter.computed + CUDA if run.drafter.trains else 0
    return Card(total, trainer + drafter, int(engine_share(run) * total), required.teachers_on_card)


def model_config(run: Run) -> ModelConfig:
    """The shape of the model; CheckpointError when there is none."""
    if (directory := run.model.directory) is not None:
        return read_config(directory, run.model.backend)
    model = run.model.warm_start
    assert model is not None
    shape = ModelConfig.from_hf(warm_start_shape(model, len(CHARACTERS) + 2))  # and the padding and the end
    if model.backend != "transformers":
        return shape
    architecture(shape.family)  # it is there, or the error says how to install it
    return msgspec.structs.replace(shape, backend="transformers")


def longest_prompt(run: Run) -> int:
    """Tokens of the longest prompt: exact for chains, else among the first that the run will ask. An example of a
    supervised start counts as a whole, without one."""
    return 0 if run.sft.on else longest(run)[0]


def longest(run: Run) -> tuple[int, Prompt]:
    """Its tokens, and the prompt itself."""
    prompts = _prompts(run, make_task(run.task, run.seed))
    if (directory := run.model.directory) is None:
        lengths = [len(prompt.text) for prompt in prompts]  # a warm start has one token per character
    else:
        lengths = [len(tokens) for tokens in load_tokenizer(directory).encode_prompts(prompts, run.rollout)]
    return max(zip(lengths, prompts, strict=True), key=lambda each: each[0])


def _prompts(run: Run, task: Task) -> list[Prompt]:
    if isinstance(task, Mixed):
        return [prompt for each in task.sources.values() for prompt in _prompts(run, each)]
    if isinstance(task, Bounded):
        return [task.longest()]
    if isinstance(task, Listed):
        if run.evaluation.prompts:
            task.prompt("held_out", 0)  # ConfigError if there is none
        return list(task.listed(LISTED_READ))
    asked: dict[Split, int] = {"train": PROMPTS_READ, "held_out": min(PROMPTS_READ, run.evaluation.prompts)}
    return [task.prompt(split, index) for split, count in asked.items() for index in range(count)]


def needs(run: Run, model: ModelConfig, prompt: int) -> Needs:
    """`prompt` is the length of the longest, in tokens."""
    count, longest = parameters(model), prompt + run.most_tokens
    precision, wide = run.rollout.precision, run.engine.carrier(run.rollout.precision)
    # Only our simulation, on a CPU, holds FP8's numbers as floats.
    held = footprint(model, count, precision if run.engine.real_fp8 else wide, run.rollout.fp8)
    held = beside_base(run, model, count, held, gpu=has_gpu())
    # On a CPU, in fp32 and with experts a layer is compiled in two parts, which keep what they keep otherwise; those of
    # transformers are counted as if they were not compiled.
    ours = model.experts is None and model.backend == "native"
    whole = trains_on_gpu(run) and run.trainer.dtype == "bf16" and ours
    compiled = whole and compiles(run.trainer.compile, "cuda")
    recomputed = recomputed_layers(run, model, gpu_memory() if trains_on_gpu(run) else None, compiled=compiled)
    batch = _largest_batch(run, prompt)
    memory = training_memory(run, model, batch, recomputed=recomputed, compiled=compiled)
    rows = min(run.engine.max_batch, run.capacity_groups * run.rollout.group_size)
    token = token_bytes(run, model)
    on_card, in_host = _teachers(run)
    return Needs(
        teachers_on_card=on_card,
        teachers_in_host=in_host,
        parameters=count,
        published=published_bytes(run, model),
        optimizer=memory.weights + memory.optimizer,
        activations=memory.activations + memory.backward,
        recomputed=recomputed,
        layers=model.layers,
        offloaded=memory.offloaded,
        engine_weights=held.weights if run.engine.has_model else 0,
        engine_base=held.base,
        kv_cache=run.engine.host_kv_cache(rows * longest * held.kv_token, gpu=has_gpu()),
        drafter=drafter_memory(head, model) if (head := run.drafter.head) and head.trains else DrafterMemory(),
        token=token,
        trajectories=run.samples_per_step * (longest * token + ROW),
        checkpoint=checkpoint_bytes(run, model),
    )


def token_bytes(run: Run, model: ModelConfig) -> int:
    """Of a token in a trajectory, with its route."""
    routes, taught = replayed_shape(run, model), run.distill.token_bytes * bool(run.teachers)
    return TOKEN + taught if routes is None else TOKEN + taught + routes.token_bytes


def _teachers(run: Run) -> tuple[int, int]:
    """Bytes of the teachers on a GPU and in the host's memory; of those that can be read."""
    on_card = in_host = 0
    for each in run.teachers:
        with suppress(CheckpointError, MissingDependencyError):  # `preflight` says it
            weights = (2 if each.dtype == "bf16" else 4) * parameters(read_config(each.directory, each.backend))
            if each.device == "cuda" or (each.device == "auto" and has_gpu()):
                on_card, in_host = on_card + weights + CUDA, in_host + PROCESS
            else:
                in_host += weights + PROCESS
    return on_card, in_host


def beside_base(run: Run, model: ModelConfig, parameters: int, found: Footprint, *, gpu: bool) -> Footprint:
    """With what adapters are merged into, if only these are published."""
    if not published_adapters(run):
        return found
    in_fp8 = numerics(found.precision, run.rollout.fp8)
    converted = model.experts is not None or (in_fp8 is not None and in_fp8.weights)
    kept = run.engine.kept_base(gpu=gpu, converted=converted)
    return with_base(found, model, parameters, kept, run.trainer.lora)


def _largest_batch(run: Run, prompt: int) -> Batch:
    """Groups of full-length completions, as many as the budget holds; a single completion may be longer than it. Models
    of transformers have a prompt for each completion, and are estimated in any case. Ranks that share a batch have as
    many times the budget, and each its part. Where their number is chosen for each batch, one rank may have a whole one
    of shorter completions."""
    context = run.trainer.context_of(prompt + run.most_tokens)
    answer, budget = run.most_tokens, context * run.trainer.token_budget
    together = max(1, min(run.rollout.group_size, (budget - prompt) // answer))
    block = prompt + together * answer
    everything = run.samples_per_step // run.rollout.group_size * (prompt + run.rollout.group_size * answer)
    tokens = -(-max(block, min(budget, everything)) // context)
    if run.trainer.context_parallel == "auto":
        tokens = max(tokens, min(run.trainer.token_budget, everything))
    return Batch(tokens, spread=together * (prompt + answer) / block, ranks=context)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
