"""What the ranks of a trainer send each other, and what of it goes from machine to machine: arithmetic alone."""

from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.config import Run
from asyncrl.fleet.placement import Demand, Offer, fitting, spans_machines
from asyncrl.models.config import GATED, ModelConfig, matrices
from asyncrl.models.head_shares import most_heads
from asyncrl.training.memory import BF16, FLOAT, adapter_parameters, parameters
from pipelines.plan.estimate import size


class RankTraffic(NamedTuple):
    """Bytes that each rank receives, at most."""

    weights: int
    """Of one batch, in its replica: each layer is gathered for the forward and for the backward."""
    gradients: int
    """Of one batch, in its replica."""
    between: int
    """Of one step, between replicas: gradients, around a ring."""


def rank_traffic(run: Run, model: ModelConfig) -> RankTraffic:
    """Of policy and gradient alone; a reference and a critic are gathered as well, tokens travel besides."""
    trainer = run.trainer
    ranks, replicas = trainer.ranks_per_replica, trainer.replicas
    item = BF16 if trainer.dtype == "bf16" else FLOAT
    reduced = BF16 if trainer.reduce_dtype == "bf16" else FLOAT
    adapters, experts = adapter_parameters(trainer.lora, model), 0
    if trainer.expert_parallel > 1:
        layers = [layer for layer in range(model.layers) if model.experts_of(layer) is not None]
        experts = sum(outputs * inputs for each in layers for outputs, inputs in matrices(model, each, GATED))
    everywhere = parameters(model) - experts
    # Of shared experts a rank gathers those that its copies in the other groups keep.
    gathered = everywhere * (ranks - 1) // ranks + experts * (ranks // trainer.expert_parallel - 1) // ranks
    learned = adapters or parameters(model)
    return RankTraffic(
        weights=2 * item * (gathered + adapters * (ranks - 1) // ranks),
        gradients=reduced * (adapters * (ranks - 1) // ranks if adapters else gathered),
        between=reduced * 2 * (replicas - 1) * learned // (replicas * ranks),
    )


def sent(run: Run, model: ModelConfig) -> Iterator[str]:
    """Sentences about it, and about whom ranks wait for; none of one rank."""
    trainer, found = run.trainer, rank_traffic(run, model)
    if trainer.ranks_per_replica > 1:
        whom = "the others of its replica" if trainer.replicas > 1 else "the others"
        yield (
            f"for each batch a rank receives at most {size(found.weights)} of weights and {size(found.gradients)} of "
            f"gradients from {whom}"
        )
    if trainer.replicas > 1:
        yield f"for each step a rank receives {size(found.between)} of gradients from the other replicas"
    if model.heads % (sharing := trainer.context_degrees[-1]):
        most, _ = most_heads(model.heads, model.kv_heads, sharing)
        yield (
            f"of the {model.heads} attention heads one of {sharing} ranks that share a batch has {most}: the others "
            "wait for it"
        )


def over_the_network(run: Run, demand: Demand, offer: Offer) -> str:
    """What of it leaves a machine, of ranks that are packed onto as few as possible; empty where nothing does."""
    trainer, room = run.trainer, max((fitting(node, demand.bundle) for node in offer.nodes), default=0)
    if trainer.ranks == 1 or not spans_machines(offer) or room >= trainer.ranks:
        return ""
    has = f"a machine of the cluster has room for {room} of {trainer.ranks} ranks of the trainer"
    if room >= trainer.ranks_per_replica:
        return f"{has}: between machines go the gradients of a step, and weights stay inside them"
    better = (
        replicas
        for replicas in range(trainer.replicas + 1, trainer.ranks + 1)
        if trainer.ranks % replicas == 0 and (each := trainer.ranks // replicas) <= room
        if each % trainer.expert_parallel == 0
    )
    instead = f"; with trainer.replicas={found} weights would stay inside them" if (found := next(better, 0)) else ""
    return f"{has}: weights and gradients of every batch go between machines{instead}"
