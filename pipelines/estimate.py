"""What a run will need, by arithmetic alone: no model is loaded, and neither torch nor Ray is imported."""

from pathlib import Path
from random import Random

import msgspec

from asyncrl.config import ChainsTask, Checkpoint, JsonlTask, NativeEngine, Run, WarmStart
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.models.config import ModelConfig, read_config
from asyncrl.tasks.base import make_task
from asyncrl.tasks.chains import CHARACTERS, draw_chain

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
    match run.task:
        case ChainsTask(max_size=size):
            texts = [draw_chain(size, Random(0)).prompt]
        case JsonlTask() as settings:
            task = make_task(settings, run.seed)
            texts = [task.prompt("train", index).text for index in range(PROMPTS_READ)]
    if isinstance(run.model, WarmStart):
        return max(map(len, texts))  # one token per character
    tokenizer = load_tokenizer(Path(run.model.path).expanduser())
    return max(len(tokenizer.encode(text)) for text in texts)


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
    rows = min(run.engine.max_batch, run.capacity_groups * run.rollout.group_size)
    native = isinstance(run.engine, NativeEngine)
    return Needs(
        parameters=count,
        published=count * FLOAT,
        optimizer=count * MASTER,
        activations=batch * FLOAT * (model.layers * layer + 3 * model.vocabulary),
        engine_weights=count * item if native else 0,
        kv_cache=2 * rows * longest * kv_token if native else 0,  # it grows by doubling
        trajectories=run.samples_per_step * (longest * TOKEN + ROW),
        checkpoint=count * SAVED,
    )
