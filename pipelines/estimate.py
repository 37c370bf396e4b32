"""What a run will need, by arithmetic alone: no model is loaded, and neither torch nor Ray is imported."""

from pathlib import Path
from random import Random

import msgspec

from asyncrl.algorithms.settings import Ppo
from asyncrl.config import Checkpoint, Run, WarmStart
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.devices import has_gpu
from asyncrl.engines.settings import EngineSettings, FakeEngine, NativeEngine, VllmEngine
from asyncrl.models.config import ModelConfig, read_config
from asyncrl.tasks.base import Split, make_task
from asyncrl.tasks.chains import CHARACTERS, draw_chain
from asyncrl.tasks.settings import ChainsTask
from asyncrl.types import Prompt

FLOAT = 4
MASTER = 4 * FLOAT
"""Bytes per parameter in the trainer: fp32 weight, gradient and Adam's two moments."""
SAVED = 3 * FLOAT
"""Bytes per parameter in a checkpoint: weight and moments."""
TOKEN = 3 * 4
"""Bytes of a token in a trajectory: id, log-probability, policy version."""
ROW = 2048
"""Bytes of a trajectory besides its tokens, rounded up."""
PROCESS = 300 << 20
"""A process that has imported torch."""
PROMPTS_READ = 256
"""Prompts whose length is measured when the task does not bound it."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, each for one process, at the largest sizes that the settings allow. Activations are an approximation."""

    parameters: int
    published: int
    """Weights of one policy version on their way to the engines."""
    optimizer: int
    activations: int
    engine_weights: int
    kv_cache: int
    trajectories: int
    """One step's samples, every answer as long as it may be."""
    checkpoint: int

    @property
    def trainer(self) -> int:
        return self.optimizer + self.activations + PROCESS

    @property
    def rollout(self) -> int:
        return self.engine_weights + self.kv_cache + PROCESS

    def host(self, run: Run) -> int:
        """Everything on one machine; published weights lie in shared memory, two versions at a time."""
        return self.trainer + run.rollout.replicas * self.rollout + 2 * self.published


def model_config(run: Run) -> ModelConfig:
    """The shape of the model; CheckpointError when there is none."""
    match run.model:
        case Checkpoint(path=path):
            return read_config(Path(path).expanduser())
        case WarmStart() as model:
            return ModelConfig.from_hf(
                {
                    "model_type": "qwen3",
                    "vocab_size": len(CHARACTERS) + 2,  # and the padding and the end
                    "hidden_size": model.hidden_size,
                    "intermediate_size": model.intermediate_size,
                    "num_hidden_layers": model.layers,
                    "num_attention_heads": model.heads,
                    "num_key_value_heads": model.kv_heads,
                    "head_dim": model.hidden_size // model.heads,
                    "tie_word_embeddings": True,
                }
            )


def longest_prompt(run: Run) -> int:
    """Tokens of the longest prompt: exact for chains, else among the first that the run will ask."""
    prompts = _prompts(run)
    if isinstance(run.model, WarmStart):
        return max(len(prompt.text) for prompt in prompts)  # one token per character
    tokenizer = load_tokenizer(Path(run.model.path).expanduser())
    return max(len(tokenizer.encode_prompt(prompt, run.rollout)) for prompt in prompts)


def _prompts(run: Run) -> list[Prompt]:
    if isinstance(run.task, ChainsTask):
        return [Prompt(uid="longest", text=draw_chain(run.task.max_size, Random(0)).prompt)]
    task = make_task(run.task, run.seed)
    asked: dict[Split, int] = {"train": PROMPTS_READ, "held_out": min(PROMPTS_READ, run.evaluation.prompts)}
    return [task.prompt(split, index) for split, count in asked.items() for index in range(count)]


def parameters(model: ModelConfig) -> int:
    """Trainable numbers; tied embeddings count once."""
    hidden, heads, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = hidden * (heads + 2 * kv) + heads * hidden
    mlp = 3 * hidden * model.intermediate_size
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    biases = (
        model.qkv_bias * (heads + 2 * kv)
        + model.out_bias * hidden
        + model.mlp_bias * (2 * model.intermediate_size + hidden)
    )
    embeddings = model.vocabulary * hidden * (1 if model.tied_embeddings else 2)
    return embeddings + model.layers * (attention + mlp + norms + biases) + hidden


def needs(run: Run, model: ModelConfig, longest: int) -> Needs:
    """`longest` is that of a prompt with its answer, in tokens."""
    count = parameters(model)
    item = 2 if run.rollout.precision == "bf16" else FLOAT
    batch = max(longest, min(run.trainer.token_budget, run.flow.groups_per_take * run.rollout.group_size * longest))
    # Saved for the backward: about ten vectors of the hidden size and four of the MLP's in each layer; then the logits,
    # their log-softmax and its gradient.
    layer = 10 * model.hidden_size + 4 * model.intermediate_size
    kv_token = 2 * model.layers * model.kv_heads * model.head_dim * item
    trained = 2 if isinstance(run.algorithm, Ppo) else 1  # the policy, and the critic of the same size
    reference = count * FLOAT if run.algorithm.kl.coefficient else 0
    rows = min(run.engine.max_batch, run.capacity_groups * run.rollout.group_size)
    return Needs(
        parameters=count,
        published=count * FLOAT,
        optimizer=trained * count * MASTER + reference,
        activations=batch * FLOAT * (model.layers * layer + 3 * model.vocabulary),
        engine_weights=0 if isinstance(run.engine, FakeEngine) else count * item,
        kv_cache=_kv_cache(run.engine, rows * longest * kv_token),
        trajectories=run.samples_per_step * (longest * TOKEN + ROW),
        checkpoint=trained * count * SAVED,
    )


def _kv_cache(engine: EngineSettings, full: int) -> int:
    """Bytes in the host's memory; `full` is what every row at its longest takes."""
    match engine:
        case NativeEngine():
            return 2 * full  # it grows by doubling
        case VllmEngine(cpu_cache_gib=size):
            return 0 if has_gpu() else size << 30
        case FakeEngine():
            return 0
