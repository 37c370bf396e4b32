"""What training takes of a device's memory, by arithmetic alone: no model is loaded and torch is not imported.

The peak lies in the backward, with the gradients of earlier batches there:

    weights + gradients + Adam's moments + what the forward kept + the larger of
        head    two blocks of logits, and the gradient of the output matrix; with `distill.top_k` a third block
        layer   the one that is computed again, where activations are not kept, and what its backward needs besides

Of several ranks each has its part of the first three, which their replica has once; whole are the embeddings, and two
layers while they compute. Ranks that share a batch each have their part of its tokens; in attention they have all of
them and a part of the heads, which is as much, if heads divide and no key/value head is sent to several: what counts is
the rank with the most. Ranks that share experts have
their part of a layer's while it computes, and until the backward where its activations are kept; tokens are taken to be
spread evenly over them.
What a layer keeps is counted from its operations in `asyncrl.models.decoder`; a test holds it against the tensors
that autograd really keeps. Compiled, which no layer with experts is as a whole, it keeps what
`asyncrl.models.execution` says. Sizes: E hidden, F gated layer, H query heads, K key/value heads, D head dimension.

Of a model of transformers the number of weights is that of its files, and what its layers keep is an estimate: as much
as two layers of ours with the same sizes (measured: 1.0 to 2.5, most with linear attention).
"""

from typing import NamedTuple

import msgspec

from asyncrl.config import Run
from asyncrl.config.trainer import Lora
from asyncrl.config.weights import published_adapters
from asyncrl.models.config import GATED, ModelConfig, matrices
from asyncrl.models.head_shares import most_heads
from asyncrl.precision.memory import footprint

FLOAT = 4
BF16 = 2
ADAM = 2 * FLOAT
ADAM_8BIT = 2 + 2 * FLOAT / 256
"""A byte each, and a scale for each 256."""
VERSIONS = 2
"""Versions of the weights that lie where engines read them: the one that they load, and the next."""
STAGED = 3 << 25
"""Numbers of offloaded state that visit the GPU at a time (asyncrl.training.adamw)."""
TOP = 6
"""Numbers of each of a teacher's likeliest tokens: as it travels and its id in 8 bytes, what the policy says of it, and
the gradient of that."""
ROUTE = 64
"""Of one chosen expert of one token: indices in 8 bytes each, and weights."""
THROUGH_TRANSFORMERS = 2
"""What a layer of transformers keeps, over what ours would."""
AUTO_SPREAD = 2.0
AUTO_SHARE = 0.8
"""`checkpoint_activations=auto` keeps the activations of as many layers as fit into so much of the trainer's part."""


class Batch(NamedTuple):
    """The largest forward and backward."""

    tokens: int
    """Of one rank."""
    spread: float = 1.0
    """Tokens that attention sees, over tokens: the answers of a group each see their common prompt."""
    ranks: int = 1
    """That share it."""


class TrainingMemory(NamedTuple):
    """Bytes at the peak."""

    weights: int
    """What is computed with, the rest of the fp32 masters, critic and reference."""
    optimizer: int
    """Gradients and Adam's moments."""
    activations: int
    """What the forward keeps for the backward."""
    backward: int
    """What the backward needs besides: logits, or a layer's own."""

    offloaded: int = 0
    """In the host's memory instead."""

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + self.activations + self.backward


def parameters(model: ModelConfig) -> int:
    """Trainable numbers; tied embeddings count once."""
    return model.parameters or _outside(model) + sum(_layer(model, layer) for layer in range(model.layers))


def critic_parameters(model: ModelConfig) -> int:
    """A body without an output matrix, and a head with one output."""
    return parameters(model.without_output()) + model.hidden_size


def _outside(model: ModelConfig) -> int:
    """Embeddings, output matrix and the last norm."""
    return model.vocabulary * model.hidden_size * (1 if model.tied_embeddings else 2) + model.hidden_size


def _layer(model: ModelConfig, layer: int) -> int:
    if model.parameters:
        return max(0, model.parameters - _outside(model)) // model.layers
    hidden, heads, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = hidden * (heads + 2 * kv) + heads * hidden
    experts = model.experts_of(layer)
    mlp = sum(outputs * inputs for outputs, inputs in matrices(model, layer, GATED))
    mlp += 0 if experts is None else experts.count * hidden
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    biases = (
        model.qkv_bias * (heads + 2 * kv)
        + model.out_bias * hidden
        + model.mlp_bias * (2 * model.intermediate_size + hidden)
    )
    return attention + mlp + norms + biases


def _largest_layer(model: ModelConfig) -> int:
    return max(_layer(model, layer) for layer in range(model.layers))


class _Gated(NamedTuple):
    """Numbers of one token in a gated layer, or in those of its experts."""

    width: int
    copied: int = 0
    """What all its experts together are given, and as much again what they answer."""

    @classmethod
    def of(cls, model: ModelConfig) -> "_Gated":
        experts = model.experts
        if experts is None:
            return cls(model.intermediate_size)
        return cls(experts.active * experts.width, experts.active * model.hidden_size)

    @property
    def kept(self) -> int:
        """Both products, the gate's activation and the gated product; inputs and answers of experts."""
        return 4 * self.width + 2 * self.copied

    @property
    def backward(self) -> int:
        """Gradients that are there beside what was kept: of the gated product, or of answers and of their weights."""
        return max(self.width, 2 * self.copied)


def _router_bytes(model: ModelConfig, item: int) -> int:
    """Of one token: the normalised state in fp32, scores, chosen experts with their weights and places."""
    experts = model.experts
    if experts is None:
        return 0
    return (FLOAT - item) * model.hidden_size + FLOAT * experts.count + ROUTE * experts.active


def chunk_tokens(logits_bytes: int, vocabulary: int) -> int:
    """Tokens whose logits may be there at a time."""
    return max(1, logits_bytes // (FLOAT * vocabulary))


def training_memory(
    run: Run, model: ModelConfig, batch: Batch, *, recomputed: int = 0, compiled: bool = False
) -> TrainingMemory:
    """With so many layers computed again in the backward."""
    narrow = run.trainer.dtype == "bf16"
    held = _held(run, model, narrow=narrow, kept=model.layers - recomputed)
    critic = 0 if run.algorithm.critic_rate is None else critic_parameters(model)
    # The residual stream, normalised and not, the final states, and the angles' cosines and sines.
    ends = 3 * FLOAT * model.hidden_size + 2 * (BF16 if narrow else FLOAT) * model.head_dim
    heads, kv_heads = most_heads(model.heads, model.kv_heads, batch.ranks)
    model = msgspec.structs.replace(model, heads=batch.ranks * heads, kv_heads=batch.ranks * kv_heads)
    layer = layer_bytes(model, batch.spread, narrow=narrow, compiled=compiled)
    short = recomputed_bytes(model, narrow=narrow, compiled=compiled)
    again = layer if recomputed else 0
    backward = max(
        _head_bytes(run, model, batch.tokens),
        batch.tokens * _layer_backward_bytes(model, batch.spread, again, narrow=narrow, compiled=compiled),
    )
    return TrainingMemory(
        weights=held.weights + FLOAT * critic,
        optimizer=held.optimizer + (FLOAT + ADAM) * critic,
        activations=batch.tokens * (recomputed * short + (model.layers - recomputed) * layer + ends),
        backward=backward,
        offloaded=held.offloaded,
    )


class _Held(NamedTuple):
    weights: int
    optimizer: int
    offloaded: int = 0


def moment_bytes(run: Run) -> float:
    """Of one trained number."""
    return ADAM_8BIT if run.trainer.optimizer == "adamw_8bit" else ADAM


def _held(run: Run, model: ModelConfig, *, narrow: bool, kept: int) -> _Held:
    """Weights of policy and reference; gradients and moments. `kept`: layers whose activations are."""
    count, item, ranks = parameters(model), BF16 if narrow else FLOAT, run.trainer.ranks_per_replica
    adapters = adapter_parameters(run.trainer.lora, model)
    learned, penalty = adapters or count, bool(run.algorithm.kl.coefficient)
    if run.trainer.ranks > 1:
        part, whole = -(-(count + adapters) // ranks), _whole(run, model) * item
        copied = narrow or ranks > run.trainer.expert_parallel  # else experts are computed with as they lie
        weights = part * FLOAT + whole + kept * copied * _shared_experts(run, model) * item
        return _Held(weights * (1 + penalty), -(-learned // ranks) * (FLOAT + ADAM) + (0 if adapters else whole))
    weights = count * item * (1 + penalty) + adapters * FLOAT
    half = (FLOAT - BF16) * count if narrow and not adapters else 0
    moments = int(learned * moment_bytes(run))
    if run.trainer.offload == "none":
        return _Held(weights + half, learned * FLOAT + moments)
    staged = int(min(STAGED, learned) * (half + moments) / learned)
    return _Held(weights, learned * FLOAT + staged, half + moments)


def _whole(run: Run, model: ModelConfig) -> int:
    """Numbers of a rank among several that are not only its part: embeddings, and two layers while they compute."""
    largest, experts = _largest_layer(model), _shared_experts(run, model)
    return _outside(model) + 2 * (largest - run.trainer.expert_parallel * experts + experts)


def _shared_experts(run: Run, model: ModelConfig) -> int:
    """Numbers of the experts of a layer that one of the ranks which share them computes; 0 where they do not."""
    if (degree := run.trainer.expert_parallel) == 1 or model.experts is None:
        return 0
    layer = next(layer for layer in range(model.layers) if model.experts_of(layer) is not None)
    return sum(outputs * inputs for outputs, inputs in matrices(model, layer, GATED)) // degree


def adapter_parameters(lora: Lora, model: ModelConfig) -> int:
    """A and B of every target in every layer, and of every expert."""
    layers = range(model.layers)
    return lora.rank * sum(sum(shape) for layer in layers for shape in matrices(model, layer, lora.targets))


def layer_bytes(model: ModelConfig, spread: float, *, narrow: bool, compiled: bool = False) -> int:
    """What a layer keeps of one token."""
    if model.backend == "transformers":
        ours = msgspec.structs.replace(model, backend="native")
        return THROUGH_TRANSFORMERS * layer_bytes(ours, spread, narrow=narrow)
    item = BF16 if narrow else FLOAT
    heads, rotated, kv = (n * model.head_dim for n in (model.heads, model.heads + model.kv_heads, model.kv_heads))
    if compiled:  # the input, and the results of attention and of every product but the last
        products = heads + 2 * kv + model.hidden_size + 2 * model.intermediate_size
        return recomputed_bytes(model, narrow=narrow, compiled=True) + item * products
    residual = 2 * FLOAT * model.hidden_size
    norms = 2 * (FLOAT + item) * model.hidden_size
    gated = item * _Gated.of(model).kept + _router_bytes(model, item)
    # In bf16 keys and values alone are gathered for each completion, else padded queries as well.
    gathered = 2 * kv if narrow else heads + 2 * kv
    attention = item * (rotated + heads) + FLOAT * model.heads + int(item * gathered * spread)
    qk_norm = (2 * FLOAT * rotated if narrow else FLOAT * (2 * rotated + kv)) if model.qk_norm else 0
    return residual + norms + gated + attention + qk_norm


def recomputed_bytes(model: ModelConfig, *, narrow: bool, compiled: bool) -> int:
    """The same of a layer that is computed again."""
    attention = (BF16 if narrow else FLOAT) * model.heads * model.head_dim + FLOAT * model.heads
    return FLOAT * model.hidden_size + attention * compiled


def recomputed_layers(run: Run, model: ModelConfig, card: int | None, *, compiled: bool = False) -> int:
    """How many layers are computed again in the backward; `card` is the GPU's memory, None without one."""
    wanted = run.trainer.checkpoint_activations
    if wanted != "auto":
        return model.layers * wanted if isinstance(wanted, bool) else min(wanted, model.layers)
    if card is None:
        return 0
    ranks = run.trainer.context_of(run.most_tokens)
    share, batch = engine_share(run), Batch(run.trainer.token_budget, AUTO_SPREAD, ranks)
    room = AUTO_SHARE * ((1 - share) * card - (VERSIONS * published_bytes(run, model) if share else 0))
    for layers in range(model.layers):
        if training_memory(run, model, batch, recomputed=layers, compiled=compiled).peak <= room:
            return layers
    return model.layers


def published_bytes(run: Run, model: ModelConfig) -> int:
    """One version of the weights on its way to the engines."""
    if published_adapters(run):
        return FLOAT * adapter_parameters(run.trainer.lora, model)
    precision = run.rollout.precision if run.engine.travels_in_fp8 else run.engine.carrier(run.rollout.precision)
    return footprint(model, parameters(model), precision, run.rollout.fp8).weights


def engine_share(run: Run) -> float:
    """The part of a card that all the engines on it take."""
    return min(1.0, run.engines * run.engine.gpu_share)


def _head_bytes(run: Run, model: ModelConfig, tokens: int) -> int:
    item = BF16 if run.trainer.dtype == "bf16" else FLOAT
    rows = min(tokens, chunk_tokens(run.trainer.logits_bytes, model.vocabulary))
    block, matrix = rows * model.vocabulary * FLOAT, model.vocabulary * model.hidden_size
    states = 2 * item * tokens * model.hidden_size
    top = run.distill.top_k
    if rows == tokens and not top:  # all at once: log-probabilities, their gradient and the logits'
        return 3 * block + states
    states += TOP * FLOAT * top * tokens
    return max((3 if top else 2) * block, block * item // FLOAT + FLOAT * matrix) + FLOAT * matrix + states


def _layer_backward_bytes(
    model: ModelConfig, spread: float, layer: int, *, narrow: bool, compiled: bool = False
) -> int:
    """Of one token: a layer that was computed again, with what its gated layer or its attention need besides."""
    item = BF16 if narrow else FLOAT
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = int(FLOAT * heads + 2 * item * (heads + kv) * spread)
    if compiled:  # the gated product and the gradients of both sides of it
        return layer + max(4 * item * model.intermediate_size, attention) + 2 * FLOAT * model.hidden_size
    gated = _Gated.of(model)
    return max(layer + max(item * gated.backward, attention - item * gated.kept), 4 * FLOAT * model.hidden_size)
