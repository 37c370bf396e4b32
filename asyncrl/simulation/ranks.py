"""What a cluster adds to the costs of one GPU, and the costs of one GPU where nobody measured them.

Without `hardware` a profile's numbers count as they stand. With it, and the model's sizes:

- an engine without a `step` is a roofline: a step reads weights and computes rows at the same time, then reads the KV
  cache; two all-reduces in each layer join its GPUs;
- a trainer without `per_token` computes the operations of its passes. Ranks are FSDP's: each layer is gathered before
  its forward and again before its backward, and its gradient is scattered in fp32, for every batch. Neighbours that
  share experts or a batch exchange tokens in every layer;
- an update without `seconds` is gathered on the trainer's ranks and sent to every GPU of the engines, in turns.

The order of collectives and what travels in them is that of `asyncrl.training.distributed`, `asyncrl.models` and
`asyncrl.weights.gather`.
"""

from collections.abc import Callable, Sequence
from math import ceil, lcm

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.models.head_shares import head_shares
from asyncrl.simulation.collectives import Links
from asyncrl.simulation.hardware import Hardware
from asyncrl.simulation.profile import Affine, EngineCost, Profile, Roofline, SyncCost, TrainerCost
from asyncrl.simulation.shape import Shape

BF16, FP32 = 2, 4
BUCKET = 256 << 20
"""Bytes that are gathered and sent in turns, as `asyncrl.weights.manifest` cuts them."""
CHUNK = 2048
"""Tokens that an engine prefills together."""
STATE = 16
"""Bytes of the trainer for each parameter: weights, gradients and moments."""
USABLE = 0.9
"""Of a GPU's memory."""


def on_cluster(profile: Profile, *, engines: int, trainer_gpus: int) -> Profile:
    """`profile` with every number that follows from its hardware and model, for one split."""
    if profile.hardware is None or profile.model is None:
        return profile
    links = Links.of(profile.hardware, profile.reached)
    return msgspec.structs.replace(
        profile,
        engine=_engine(profile, profile.hardware, profile.model, links),
        sync=_publication(profile, profile.model, links, engines, trainer_gpus),
    )


def problem(profile: Profile, trainer_gpus: int) -> str:
    """Why so many GPUs cannot train; empty if they can."""
    if profile.hardware is None or profile.model is None:
        return ""
    shape, capacity = profile.model, profile.hardware.capacity
    unit = lcm(profile.trainer.context_parallel, profile.trainer.expert_parallel)
    least = ceil(STATE * shape.parameters / (USABLE * capacity) / unit) * unit
    if trainer_gpus < least:
        return (
            f"{trainer_gpus} GPUs of {capacity / 1e9:g} GB are too few for the trainer's "
            f"{STATE * shape.parameters / 1e9:,.0f} GB: give it {least} or more"
        )
    if trainer_gpus % unit:
        return (
            f"{trainer_gpus} GPUs of the trainer are no multiple of {unit}, which profile.trainer.context_parallel="
            f"{profile.trainer.context_parallel} and expert_parallel={profile.trainer.expert_parallel} ask for"
        )
    return ""


# -- engines ---------------------------------------------------------------------------------------------------------


def _engine(profile: Profile, hardware: Hardware, shape: Shape, links: Links) -> EngineCost:
    engine, reached = profile.engine, profile.reached
    if engine.step != Affine():
        return engine
    gpus = engine.gpus
    held = BF16 * shape.parameters / gpus
    if held > USABLE * hardware.capacity:
        raise ConfigError(
            f"profile.engine.gpus={gpus}: each would hold {held / 1e9:.0f} GB of the weights, and has "
            f"{hardware.capacity / 1e9:g} GB; set {ceil(held * gpus / (USABLE * hardware.capacity))} or more"
        )
    read, compute = gpus * hardware.memory * reached.memory, gpus * hardware.flops * reached.decoding
    joined = 2 * shape.layers * links.reduce(0, gpus)
    row = 2 * shape.layers * links.reduce(BF16 * shape.hidden, gpus) - joined
    experts = shape.layers * shape.gated if shape.experts else 0
    prefill = 2 * shape.layers * links.reduce(CHUNK * BF16 * shape.hidden, gpus) / CHUNK
    return msgspec.structs.replace(
        engine,
        step=Roofline(
            seconds=shape.layers * reached.layer_seconds + joined,
            per_row=reached.row_seconds + row,
            read=BF16 * (shape.parameters - shape.outside + shape.table - experts) / read,
            compute_row=2 * shape.used / compute,
            experts=shape.experts,
            active=shape.active,
            all_experts=BF16 * experts / read,
        ),
        # More GPUs than heads of keys and values: each reads one.
        per_context_token=2 * BF16 * shape.layers * max(shape.kv_heads, gpus) * shape.head_dim / read,
        per_prefilled_token=2 * shape.used / (gpus * hardware.flops * reached.training) + prefill,
    )


# -- the trainer -----------------------------------------------------------------------------------------------------


def training(profile: Profile, gpus: int, lengths: Sequence[int]) -> Callable[[int], float]:
    """Seconds of a forward and backward by its sampled tokens; `lengths` are those of some completions."""
    trainer = profile.trainer
    if profile.hardware is None or profile.model is None:
        return lambda tokens: trainer.per_take + tokens * trainer.token_seconds / gpus
    if why_not := problem(profile, gpus):
        raise ConfigError(why_not)
    shape, links = profile.model, Links.of(profile.hardware, profile.reached)
    reached = profile.hardware.flops * profile.reached.training
    token_seconds = trainer.token_seconds or operations(shape, trainer, _attended(profile, lengths)) / reached
    shares = gpus // trainer.context_parallel
    sharded, experts = fsdp_seconds(shape, trainer, links, gpus), expert_seconds(shape, trainer, links, gpus)

    def seconds(tokens: int) -> float:
        batches = max(1, ceil(tokens / (shares * trainer.token_budget)))
        compute = tokens * token_seconds / gpus
        hidden = min(profile.reached.overlap * batches * sharded, compute)
        exchanged = exchange_seconds(shape, trainer, links, tokens / gpus / batches)
        return trainer.per_take + compute + batches * (sharded + experts + exchanged) - hidden

    return seconds


def operations(shape: Shape, trainer: TrainerCost, context: float) -> float:
    """Of one token in a forward and backward: two for each weight in a forward, and four for each number of a head in
    each of the `context` tokens that it attends to. A backward has twice as many; that of attention computes the scores
    again, and has five products to the forward's two."""
    forwards = 1 + trainer.recompute + trainer.forwards
    weights, attention = 2 * shape.used, 4 * shape.layers * shape.heads * shape.head_dim * context
    return (forwards + 2) * weights + (forwards + 2.5) * attention


def _attended(profile: Profile, lengths: Sequence[int]) -> float:
    """Tokens, on average: half of the token's own completion with its prompt."""
    whole = [profile.prompt_tokens + length for length in lengths]
    return sum(length * length for length in whole) / (2 * sum(whole))


def fsdp_seconds(shape: Shape, trainer: TrainerCost, links: Links, ranks: int) -> float:
    """All gathers and scatters of one batch. What is in no layer stays whole from forward to backward. Shared experts
    are not FSDP's."""
    layer = shape.attention + (0 if trainer.expert_parallel > 1 else shape.gated)
    gathers = 2 + trainer.forwards
    layers = gathers * links.gather(BF16 * layer, ranks) + links.gather(FP32 * layer, ranks)
    outside = (gathers - 1) * links.gather(BF16 * shape.outside, ranks) + links.gather(FP32 * shape.outside, ranks)
    return shape.layers * layers + outside


def expert_seconds(shape: Shape, trainer: TrainerCost, links: Links, ranks: int) -> float:
    """Of one batch: ranks with the same place in their groups gather the experts that all of them compute, once for
    each forward, and scatter their gradients, in bf16. Nothing of it is hidden."""
    if trainer.expert_parallel == 1:
        return 0.0
    rounds = 2 + trainer.recompute + trainer.forwards
    size = BF16 * shape.gated / trainer.expert_parallel
    copies = ranks // trainer.expert_parallel
    return shape.layers * rounds * links.gather(size, copies, stride=trainer.expert_parallel)


def exchange_seconds(shape: Shape, trainer: TrainerCost, links: Links, tokens: float) -> float:
    """Of one batch, of which a rank has `tokens`: each of them to its experts and back, and queries, keys and values
    to the ranks that have their heads, and the result back; what counts is the rank with the most heads. A backward
    exchanges as much as a forward."""
    rounds = 2 + trainer.recompute + trainer.forwards
    row = BF16 * tokens * shape.head_dim
    ranks = trainer.context_parallel
    shares = head_shares(shape.heads, shape.kv_heads, ranks)
    there, back = max(share.num_sent for share in shares), max(share.num_queries for share in shares)
    heads = links.exchange(row * ranks * there, ranks) + links.exchange(row * ranks * back, ranks)
    sent = BF16 * tokens * shape.active * shape.hidden
    return rounds * shape.layers * (heads + 2 * links.exchange(sent, trainer.expert_parallel))


# -- weights ---------------------------------------------------------------------------------------------------------


def _publication(profile: Profile, shape: Shape, links: Links, engines: int, trainer_gpus: int) -> SyncCost:
    if profile.sync.seconds:
        return profile.sync
    size, receivers = BF16 * shape.parameters, engines * profile.engine.gpus
    return SyncCost(seconds=publication_seconds(size, links, trainer_gpus, receivers))


def publication_seconds(size: float, links: Links, trainer_gpus: int, receivers: int) -> float:
    """Buckets are gathered, then sent: the ranks take turns."""
    buckets = ceil(size / BUCKET)
    bucket = size / buckets
    return buckets * (links.gather(bucket, trainer_gpus) + links.send(bucket, receivers, trainer_gpus + receivers))
