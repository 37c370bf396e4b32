"""What training takes of a device's memory, by arithmetic alone: no model is loaded and torch is not imported.

The peak lies in the backward, with the gradients of earlier batches there:

    weights + gradients + Adam's moments + what the forward kept + the larger of
        head    two blocks of logits, and the gradient of the output matrix
        layer   the one that is computed again, where activations are not kept, and what its backward needs besides

Of several ranks each has its part of the first three; whole are the embeddings, and two layers while they compute.
What a layer keeps is counted from its operations in `asyncrl.models.decoder`; a test holds it against the tensors
that autograd really keeps. Sizes: E hidden, F gated layer, H query heads, K key/value heads, D head dimension.
"""

from typing import NamedTuple

from asyncrl.config import Run
from asyncrl.config.trainer import Lora
from asyncrl.models.config import ModelConfig, projection_shapes

FLOAT = 4
ADAM = 2 * FLOAT
AUTO_SPREAD = 2.0
AUTO_SHARE = 0.8
"""`checkpoint_activations=auto` keeps activations that fit into this much of the trainer's part of the card."""


class Batch(NamedTuple):
    """The largest forward and backward."""

    tokens: int
    spread: float = 1.0
    """Tokens that attention sees, over tokens: the answers of a group each see their common prompt."""


class TrainingMemory(NamedTuple):
    """Bytes at the peak."""

    weights: int
    """Fp32 masters, bf16 working copies, critic and reference."""
    optimizer: int
    """Gradients and Adam's moments."""
    activations: int
    """What the forward keeps for the backward."""
    backward: int
    """What the backward needs besides: logits, or a layer's own."""

    @property
    def peak(self) -> int:
        return sum(self)


def parameters(model: ModelConfig) -> int:
    """Trainable numbers; tied embeddings count once."""
    return _outside(model) + model.layers * _layer(model)


def _outside(model: ModelConfig) -> int:
    """Embeddings, output matrix and the last norm."""
    return model.vocabulary * model.hidden_size * (1 if model.tied_embeddings else 2) + model.hidden_size


def _layer(model: ModelConfig) -> int:
    hidden, heads, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = hidden * (heads + 2 * kv) + heads * hidden
    mlp = 3 * hidden * model.intermediate_size
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    biases = (
        model.qkv_bias * (heads + 2 * kv)
        + model.out_bias * hidden
        + model.mlp_bias * (2 * model.intermediate_size + hidden)
    )
    return attention + mlp + norms + biases


def chunk_tokens(logits_bytes: int, vocabulary: int) -> int:
    """Tokens whose logits may be there at a time."""
    return max(1, logits_bytes // (FLOAT * vocabulary))


def training_memory(run: Run, model: ModelConfig, batch: Batch, *, recompute: bool) -> TrainingMemory:
    narrow = run.trainer.dtype == "bf16"
    trained = 1 if run.algorithm.critic_rate is None else 2  # the policy, and the critic of the same size
    weights, gradients, reference = _held(run, model, narrow=narrow)
    layer = layer_bytes(model, batch.spread, narrow=narrow)
    # The residual stream, normalised and not, the final states, and the angles' cosines and sines.
    ends = 3 * FLOAT * model.hidden_size + 2 * (2 if narrow else FLOAT) * model.head_dim
    kept = model.layers * (FLOAT * model.hidden_size if recompute else layer) + ends
    backward = max(
        _head_bytes(run, model, batch.tokens),
        batch.tokens * _layer_backward_bytes(model, batch.spread, layer if recompute else 0, narrow=narrow),
    )
    return TrainingMemory(
        weights=trained * weights + reference,
        optimizer=trained * gradients,
        activations=batch.tokens * kept,
        backward=backward,
    )


def _held(run: Run, model: ModelConfig, *, narrow: bool) -> tuple[int, int, int]:
    """Weights; gradients and moments; a reference, where there is one."""
    count, item, ranks = parameters(model), 2 if narrow else FLOAT, run.trainer.ranks
    adapters = adapter_parameters(run.trainer.lora, model)
    learned, penalty = adapters or count, bool(run.algorithm.kl.coefficient)
    if ranks == 1:
        weights = count * item + adapters * FLOAT if adapters else count * (FLOAT + item * narrow)
        return weights, learned * (FLOAT + ADAM), count * item * penalty
    part, whole = -(-(count + adapters) // ranks), (_outside(model) + 2 * _layer(model)) * item
    kept = part * FLOAT + whole
    return kept, -(-learned // ranks) * (FLOAT + ADAM) + (0 if adapters else whole), kept * penalty


def adapter_parameters(lora: Lora, model: ModelConfig) -> int:
    """A and B of every target in every layer."""
    shapes = projection_shapes(model)
    return lora.rank * model.layers * sum(sum(shapes[target]) for target in lora.targets)


def layer_bytes(model: ModelConfig, spread: float, *, narrow: bool) -> int:
    """What a layer keeps of one token."""
    item = 2 if narrow else FLOAT
    heads, rotated, kv = (n * model.head_dim for n in (model.heads, model.heads + model.kv_heads, model.kv_heads))
    residual = 2 * FLOAT * model.hidden_size
    norms = 2 * (FLOAT + item) * model.hidden_size
    gated = 4 * item * model.intermediate_size
    # In bf16 keys and values alone are gathered for each answer, else padded queries as well.
    gathered = 2 * kv if narrow else heads + 2 * kv
    attention = item * (rotated + heads) + FLOAT * model.heads + int(item * gathered * spread)
    qk_norm = (2 * FLOAT * rotated if narrow else FLOAT * (2 * rotated + kv)) if model.qk_norm else 0
    return residual + norms + gated + attention + qk_norm


def recomputes(run: Run, model: ModelConfig, card: int | None) -> bool:
    """Whether layers are computed again in the backward; `card` is the GPU's memory, None without one."""
    wanted = run.trainer.checkpoint_activations
    if wanted != "auto":
        return wanted
    if card is None:
        return False
    whole = training_memory(run, model, Batch(run.trainer.token_budget, AUTO_SPREAD), recompute=False)
    return whole.peak > AUTO_SHARE * (1 - engine_share(run)) * card


def engine_share(run: Run) -> float:
    """The part of a card that all the engines on it take."""
    return min(1.0, run.rollout.replicas * run.engine.gpu_share)


def _head_bytes(run: Run, model: ModelConfig, tokens: int) -> int:
    item = 2 if run.trainer.dtype == "bf16" else FLOAT
    rows = min(tokens, chunk_tokens(run.trainer.logits_bytes, model.vocabulary))
    block, matrix = rows * model.vocabulary * FLOAT, model.vocabulary * model.hidden_size
    states = 2 * item * tokens * model.hidden_size
    if rows == tokens:  # all at once: log-probabilities, their gradient and the logits'
        return 3 * block + states
    return max(2 * block, block * item // FLOAT + FLOAT * matrix) + FLOAT * matrix + states


def _layer_backward_bytes(model: ModelConfig, spread: float, layer: int, *, narrow: bool) -> int:
    """Of one token: a layer that was computed again, with what its gated layer or its attention need besides."""
    item = 2 if narrow else FLOAT
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = int(FLOAT * heads + 2 * item * (heads + kv) * spread)
    gated = item * model.intermediate_size
    return max(layer + max(gated, attention - 4 * gated), 4 * FLOAT * model.hidden_size)
