"""`asyncrl plan`, printed: the pipeline as a picture of characters, one step in numbers, placement and memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from asyncrl.config import Run
from asyncrl.config.user_code import Reward, stages
from asyncrl.config.weights import published_adapters
from asyncrl.engines.registry import why_engine
from asyncrl.errors import AsyncRLError
from asyncrl.fleet.placement import Demand, Offer, arriving, demands, in_words, needed
from asyncrl.models.config import ModelConfig
from asyncrl.precision.memory import footprints
from asyncrl.simulation.outcome import Rates
from asyncrl.system.devices import mps_runs
from pipelines.plan.backend import described
from pipelines.plan.disk import most_checkpoints
from pipelines.plan.estimate import (
    Needs,
    Traffic,
    beside_base,
    card,
    longest_prompt,
    model_config,
    needs,
    size,
    traffic,
)
from pipelines.plan.ranks import over_the_network, sent

WIDTH = 62
"""Of a box; with the way back of the weights beside it 80 columns suffice."""
ASCII = str.maketrans("┌┐└┘─│▼◀", "++++-|v<")
"""For terminals that have no other characters."""
REFERENCE_CARD = 80 * 10**9
"""Memory of a GPU that precisions are compared on where none is here."""


class Box(NamedTuple):
    """A role, and what it sends to the next one below."""

    title: str
    lines: Sequence[str]
    edge: str = ""


def show(run: Run, console: Console, offer: Offer | None = None, pace: Rates | None = None) -> None:
    """Print who would run, what one step is made of, and what moves between the actors; `offer` is the cluster's, and
    `pace` that of a simulation."""
    console.print(f"{run.name}: {run.steps} steps into {Path(run.root) / run.name}", style="bold")
    console.print(arithmetic(run))
    wanted = demands(run, offer) if offer is not None else {}
    try:
        model = model_config(run)
        prompt = longest_prompt(run)
    except AsyncRLError:
        return  # `preflight` says why
    required = needs(run, model, prompt)
    form = "as adapters" if published_adapters(run) else f"in {run.engine.carrier(run.rollout.precision)}"
    console.print(
        f"model: {model.family}, {required.parameters:,} parameters, {size(required.published)} published {form}; "
        f"{'longest example at most' if run.sft.on else 'longest prompt with its completion'} "
        f"{prompt + run.most_tokens} tokens"
    )
    if run.engine.has_model and run.engines:
        console.print(why_engine(run))
    if model.backend == "transformers":
        console.print(f"trained with {described(model)}; its memory is an estimate")
    _show_graph(run, required, wanted, traffic(run, required, prompt, pace), pace, console)
    for line in sent(run, model):
        console.print(f"trainer: {line}")
    if offer is not None:
        _show_placement(run, offer, console)
    if run.engines:
        console.print(_precisions(run, model, required))
    console.print(
        f"this machine: {os.cpu_count()} CPUs; memory at most about {size(required.host(run))}; on disk "
        f"{_checkpoints(run, required)} and at most {size(run.steps * required.trajectories)} of trajectories"
    )
    if run.checkpoint.keep == 1 and run.buffer.keep != "all":
        console.print(
            f"checkpoint.keep=1 with buffer.keep={run.buffer.keep}: if that one checkpoint is damaged, the run cannot "
            "go on, for what came before it is deleted; checkpoint.keep=2 keeps a way back",
            soft_wrap=True,
        )
    _show_card(run, required, console)


def _checkpoints(run: Run, required: Needs) -> str:
    most = most_checkpoints(run)
    if not most:
        return "no checkpoints"
    return f"at most {size(most * required.checkpoint)} of checkpoints ({most} x {size(required.checkpoint)})"


def arithmetic(run: Run) -> str:
    """What one step is, and how far generation may be ahead of training."""
    flow, ahead = run.flow, run.max_staleness
    step = f"1 step = {flow.groups_per_step} prompts x {run.rollout.group_size} = {run.samples_per_step} samples"
    begins = f"training begins with the first {flow.groups_per_take} complete groups"
    if ahead == 0:
        return f"{step}, no publish ahead: synchronous, every token is of the version that is trained; {begins}"
    publishes = f"{ahead} publish{'es' * (ahead > 1)} ahead"
    if run.staleness.band is not None:
        publishes = f"up to {publishes}, as staleness={run.staleness.kind} decides"
    fresh = {"auto": ", as few of them ready as keep the trainer busy", 0: ""}.get(
        flow.max_ready_groups, f", at most {flow.max_ready_groups} of them complete or just begun"
    )
    admitted = f"{run.capacity_groups} groups admitted{fresh}"
    oldest = f"the oldest token at most {ahead} version{'s' * (ahead > 1)} old"
    return f"{step}, {publishes}: {admitted}, {oldest}; {begins}"


def _show_graph(
    run: Run, required: Needs, wanted: Mapping[str, Demand], moves: Traffic, pace: Rates | None, console: Console
) -> None:
    back = ("weights", size(moves.to_engines), moves.per) if run.engines else ("slots", "return", "")
    lines = draw(boxes(run, required, wanted, moves), back)
    source = f"examples ({run.sft.path})" if run.sft.on else f"prompts ({run.task.kind})"
    picture = "\n".join([source, "   ▼", *lines])
    console.print(picture.translate(ASCII) if console.options.ascii_only else picture, soft_wrap=True)
    if pace is None:
        console.print(
            "bytes per step; `--from RUN` or `--profile NAME`, as in `asyncrl simulate`, gives bytes per second"
        )
    else:
        console.print(f"bytes a second as simulated, not measured: a step takes about {pace.step_seconds:.3g} s")


def _show_placement(run: Run, offer: Offer, console: Console) -> None:
    """What everybody takes together of which cluster, and what of it has to come."""
    wanted = list(demands(run, offer).values())
    whose = f"{len(offer.nodes)} node{'s' * (len(offer.nodes) > 1)}" if offer.attached else "this machine"
    has = f"; it has {in_words(offer.known)}" if offer.attached else ""
    console.print(f"cluster={run.cluster}, {whose}: together {in_words(needed(wanted)) or 'nothing of its own'}{has}")
    if line := over_the_network(run, demands(run, offer)["trainer"], offer):
        console.print(line, soft_wrap=True)
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
        f"for training ({_activations(required)}); engines "
        f"{size(found.engines)}; {f'teachers {size(found.teachers)}; ' if found.teachers else ''}"
        f"{size(found.total - found.trainer - found.engines - found.teachers)} left"
    )
    if found.trainer and found.engines:
        console.print(
            "CUDA MPS is on: kernels of trainer and engines run side by side, the engines' first"
            if mps_runs()
            else "CUDA MPS is off: trainer and engines take turns on the card. Measured so, training took up to twice "
            "as long as alone, with MPS 1.3 to 1.6 times as long. `nvidia-cuda-mps-control -d` turns it on"
        )


def _activations(required: Needs) -> str:
    if required.recomputed in (0, required.layers):
        return "activations recomputed" if required.recomputed else "activations kept"
    return f"activations of {required.recomputed} of {required.layers} layers recomputed"


def _precisions(run: Run, model: ModelConfig, required: Needs) -> Table:
    """What an engine on a GPU takes; on a CPU FP8 is simulated in floats, and saves nothing."""
    found = card(run, required)
    room = found.engines // max(1, run.engines) if found is not None and found.engines else REFERENCE_CARD
    title = f"rollout.precision: an engine with {size(room)} of a GPU"
    table = Table("precision", "weights", "KV cache per token", "KV tokens", title=title, title_justify="left")
    for plain in footprints(model, required.parameters, run.rollout.fp8):
        each = beside_base(run, model, required.parameters, plain, gpu=True)
        mark = " (chosen)" if each.precision == run.rollout.precision else ""
        tokens = f"{each.tokens(room):,}" if each.tokens(room) else "none: the weights do not fit"
        weights = f"{size(each.weights)} + {size(each.base)} base" if each.base else size(each.weights)
        table.add_row(f"{each.precision}{mark}", weights, size(each.kv_token), tokens)
    return table


def boxes(run: Run, required: Needs, wanted: Mapping[str, Demand], traffic: Traffic) -> list[Box]:
    """In the order in which a sample passes them; `wanted` says what each process takes, where it is known."""
    per = traffic.per
    optimizer = f"weights, gradients and Adam {size(required.optimizer)}, activations {size(required.activations)}"
    found = [
        Box(
            f"rollout ({run.engine.kind}) x {_engines(run)}",
            [
                _takes("rollout", wanted),
                f"memory at most about {size(required.rollout)} each: {_engine_memory(required)}",
            ],
            "completions",
        ),
        Box(
            f"reward x 1, with {run.reward.workers} worker{'s' * (run.reward.workers > 1)}",
            [
                *_judges(run.reward),
                *(f"then {stage.function}" for stage in stages(run.stages)),
                *(f"at the same time teacher {teacher.path}" for teacher in run.teachers),
            ],
            f"trajectories, {traffic.words(traffic.to_buffer)} {per}",
        ),
        Box(
            "buffer x 1",
            [f"up to {size(run.buffer.max_bytes)} of trajectories wait, on disk ({run.buffer.durability})"],
            f"batches, {traffic.words(traffic.to_trainer)} {per}",
        ),
        Box(
            f"trainer ({run.algorithm.kind}) x {run.trainer.ranks}",
            [_takes("trainer", wanted), *_degrees(run), f"memory at most about {size(required.trainer)}: {optimizer}"],
        ),
    ]
    if not run.engines:
        found = found[2:]
    if "drafter" in wanted:
        givers = {"trainer": "the trainer", "rollout": "the engines"}
        names = " and ".join(givers[source] for source in sorted(run.hidden_states_from))
        found[-1] = found[-1]._replace(edge=f"hidden states, from {names}")
        found.append(Box("drafter x 1", [_takes("drafter", wanted), "its heads go to every engine"]))
    return found


def _degrees(run: Run) -> list[str]:
    """How its ranks divide the work, where not by samples alone."""
    trainer = run.trainer
    fewest, most = trainer.context_degrees[0], trainer.context_degrees[-1]
    found = [f"{trainer.replicas} replicas of {trainer.ranks_per_replica}"] * (trainer.replicas > 1)
    if most > 1:
        found.append(f"{most} ranks share a batch" if fewest == most else f"{fewest} to {most} ranks share a batch")
    if (experts := trainer.expert_parallel) > 1:
        found.append(f"{experts} ranks share the experts of a layer")
    return [", ".join(found)] * bool(found)


def _engine_memory(required: Needs) -> str:
    base = f", base of adapters {size(required.engine_base)}" if required.engine_base else ""
    return f"weights {size(required.engine_weights)}{base}, KV cache {size(required.kv_cache)}"


def _engines(run: Run) -> str:
    return f"{run.elastic.min} to {run.elastic.max}" if run.elastic.on else str(run.rollout.replicas)


def _judges(reward: Reward) -> list[str]:
    judge = reward.judge
    asked = [f"judge {judge.model} at {judge.url}, {judge.concurrency} at a time"] if judge.on else []
    pairs = [f"each completion against {judge.pairs} others, in pairs"] if judge.pairs else []
    return [*filter(None, [reward.function]), *asked, *pairs]


def _takes(role: str, wanted: Mapping[str, Demand]) -> str:
    bundle = wanted[role].bundle if role in wanted else {}
    return f"each takes {in_words(bundle) or 'a share of the machine'}"


def draw(found: Sequence[Box], back: Sequence[str]) -> list[str]:
    """`back`, some short lines, is written along the way that leads from the trainer to the first box."""
    lines: list[str] = []
    begin = end = 1
    for box in found:
        if box.title.startswith("trainer"):
            end = len(lines) + 1
        lines += _box(box)
        if box is not found[-1]:
            lines += [f"   │ {box.edge}", "   ▼"]
    first = (begin + end - len(back)) // 2 + 1
    for row in range(begin, end + 1):
        text = back[row - first] if 0 <= row - first < len(back) else ""
        way = {begin: "◀──┐", end: "───┘"}.get(row, f"   │ {text}")
        lines[row] = f"{lines[row]:{WIDTH}}{way}".rstrip()
    return lines


def _box(box: Box) -> Iterator[str]:
    inside = WIDTH - 4
    yield f"┌─ {box.title} ".ljust(WIDTH - 1, "─") + "┐"
    for line in (part for text in box.lines for part in wrap(text, inside)):
        yield f"│ {line:{inside}} │"
    yield f"└{'─' * (WIDTH - 2)}┘"
