"""What would run: who, on what, and what moves between them."""

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.config import Run
from asyncrl.devices import mps_runs
from asyncrl.engines.settings import FakeEngine
from asyncrl.errors import AsyncRLError
from asyncrl.models.config import ModelConfig
from asyncrl.placement import Offer, arriving, demands, in_words, needed
from asyncrl.precision.memory import footprints
from asyncrl.precision.settings import carrier
from pipelines.estimate import Needs, card, longest_prompt, model_config, needs, size

REFERENCE_CARD = 80 * 10**9
"""Memory of a GPU that precisions are compared on where none is here."""


def show(run: Run, console: Console, offer: Offer | None = None) -> None:
    """Print who would run, what one step is made of, and what moves between the actors; `offer` is the cluster's."""
    groups, samples = run.flow.groups_per_step, run.rollout.group_size
    console.print(f"{run.name}: {run.steps} steps into {Path(run.root) / run.name}", style="bold")
    console.print(
        f"1 step = {groups} prompts x {samples} = {run.samples_per_step} samples; "
        f"training begins with the first {run.flow.groups_per_take} complete groups; "
        f"up to {run.capacity_groups} groups admitted ahead; {_staleness(run)}"
    )
    if offer is not None:
        _show_placement(run, offer, console)
    try:
        model = model_config(run)
        prompt = longest_prompt(run)
    except AsyncRLError:
        return  # `preflight` says why
    required = needs(run, model, prompt)
    console.print(
        f"model: {model.family}, {required.parameters:,} parameters, {size(required.published)} published in "
        f"{carrier(run.rollout.precision, run.engine)}; longest prompt with its answer "
        f"{prompt + run.rollout.max_tokens} tokens"
    )
    console.print(_actors(run, required), _edges(run, required), _precisions(run, model, required))
    total = run.steps * required.trajectories
    console.print(
        f"this machine: {os.cpu_count()} CPUs; memory at most about {size(required.host(run))}; on disk at most "
        f"{size((run.checkpoint.keep + 1) * required.checkpoint)} of checkpoints and {size(total)} of trajectories"
    )
    _show_card(run, required, console)


def _show_placement(run: Run, offer: Offer, console: Console) -> None:
    """Who takes what of which cluster, and what of it has to come."""
    wanted = list(demands(run, offer).values())
    whose = f"{len(offer.nodes)} node{'s' * (len(offer.nodes) > 1)}" if offer.attached else "this machine"
    table = Table(
        "role", "processes", "each takes", title=f"placement: cluster={run.cluster}, {whose}", title_justify="left"
    )
    for each in wanted:
        table.add_row(each.role, str(each.processes), in_words(each.bundle) or "a share of what is there")
    console.print(table)
    if offer.attached:
        console.print(f"together {in_words(needed(wanted))}; the cluster has {in_words(offer.known)}")
    if offer.could_have is not None and (coming := arriving(wanted, offer)):
        console.print(f"its autoscaler has to bring {in_words(coming)} more before everything runs")
    if run.elastic.on:
        most = list(demands(run, offer, engines=run.elastic.max).values())
        short = arriving(most, offer) if offer.attached else {}
        lacks = f", for which the cluster lacks {in_words(short)} now" if short else ""
        console.print(
            f"engines: {run.rollout.replicas} at first, {run.elastic.min} to {run.elastic.max} as needed{lacks}"
        )


def _show_card(run: Run, required: Needs, console: Console) -> None:
    found = card(run, required)
    if found is None:
        return
    console.print(
        f"GPU: {size(found.total)}; trainer at most about {size(found.trainer)}, of which {size(required.training)} "
        f"for training ({'activations computed again' if required.recompute else 'activations kept'}); engines "
        f"{size(found.engines)}; {size(found.total - found.trainer - found.engines)} left"
    )
    if found.trainer and found.engines:
        console.print(
            "CUDA MPS is on: kernels of trainer and engines run side by side"
            if mps_runs()
            else "CUDA MPS is off: trainer and engines take turns on the card. `nvidia-cuda-mps-control -d` turns it on"
        )


def _staleness(run: Run) -> str:
    if run.max_staleness == 0:
        return "synchronous: every token is of the version that is trained"
    return f"the oldest token at most {run.max_staleness} version{'s' * (run.max_staleness > 1)} old"


def _actors(run: Run, required: Needs) -> Table:
    table = Table("actor", "processes", "CPUs each", "memory each, at most about", title="actors", title_justify="left")
    threads = 1 if isinstance(run.engine, FakeEngine) else run.engine.threads
    kv = f"KV cache {size(required.kv_cache)}"
    optimizer = f"weights, gradients and Adam {size(required.optimizer)}, activations {size(required.activations)}"
    rows = [
        (f"rollout ({run.engine.__struct_config__.tag})", run.rollout.replicas, threads, required.rollout, kv),
        (f"trainer ({run.algorithm.__struct_config__.tag})", 1, run.trainer.threads, required.trainer, optimizer),
    ]
    for name, processes, cpus, memory, parts in rows:
        table.add_row(name, str(processes), str(cpus), f"{size(memory)} ({parts})")
    table.add_row("buffer", "1", "shared", f"up to {size(run.buffer.max_bytes)} of trajectories, on disk")
    table.add_row("reward", f"1 + {run.reward.workers}", "shared", run.reward.function)
    return table


def _precisions(run: Run, model: ModelConfig, required: Needs) -> Table:
    """What an engine on a GPU takes; on a CPU FP8 is simulated in floats, and saves nothing."""
    found = card(run, required)
    room = found.engines // run.rollout.replicas if found is not None and found.engines else REFERENCE_CARD
    title = f"rollout.precision: an engine with {size(room)} of a GPU"
    table = Table("precision", "weights", "KV cache per token", "KV tokens", title=title, title_justify="left")
    for each in footprints(model, required.parameters, run.rollout.fp8):
        mark = " (chosen)" if each.precision == run.rollout.precision else ""
        tokens = f"{each.tokens(room):,}" if each.tokens(room) else "none: the weights do not fit"
        table.add_row(f"{each.precision}{mark}", size(each.weights), size(each.kv_token), tokens)
    return table


def _edges(run: Run, required: Needs) -> Table:
    table = Table("edge", "each step", title="traffic", title_justify="left")
    table.add_row("rollout -> buffer -> trainer", f"at most {size(required.trajectories)} of trajectories")
    table.add_row(
        f"trainer -> {run.rollout.replicas} x rollout", f"{size(required.published)} of weights, read by each"
    )
    return table
