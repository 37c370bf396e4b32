"""The pipeline as a picture of characters: who, how many, on what, and what moves between them."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from asyncrl.config import Run
from asyncrl.placement import Demand, in_words
from asyncrl.stages.settings import stages
from pipelines.estimate import Needs, Traffic, size

WIDTH = 62
"""Of a box; with the way back of the weights beside it 80 columns suffice."""
ASCII = str.maketrans("┌┐└┘─│▼◀", "++++-|v<")
"""For terminals that have no other characters."""


class Box(NamedTuple):
    """A role, and what it hands on to the next one below."""

    title: str
    lines: Sequence[str]
    edge: str = ""


def boxes(run: Run, required: Needs, wanted: Mapping[str, Demand], traffic: Traffic) -> list[Box]:
    """In the order in which a sample passes them; `wanted` says what each process takes, where it is known."""
    per = traffic.per
    optimizer = f"weights, gradients and Adam {size(required.optimizer)}, activations {size(required.activations)}"
    found = [
        Box(
            f"rollout ({run.engine.__struct_config__.tag}) x {_engines(run)}",
            [
                _takes("rollout", wanted),
                f"memory at most about {size(required.rollout)} each: {_engine_memory(required)}",
            ],
            "answers",
        ),
        Box(
            f"reward x 1, with {run.reward.workers} worker{'s' * (run.reward.workers > 1)}",
            [run.reward.function, *(f"then {stage.function}" for stage in stages(run.stages))],
            f"trajectories, {traffic.words(traffic.to_buffer)} {per}",
        ),
        Box(
            "buffer x 1",
            [f"up to {size(run.buffer.max_bytes)} of trajectories wait, on disk ({run.buffer.durability})"],
            f"batches, {traffic.words(traffic.to_trainer)} {per}",
        ),
        Box(
            f"trainer ({run.algorithm.__struct_config__.tag}) x {run.trainer.ranks}",
            [_takes("trainer", wanted), f"memory at most about {size(required.trainer)}: {optimizer}"],
        ),
    ]
    if "drafter" in wanted:
        found[-1] = found[-1]._replace(edge="hidden states of what was trained on")
        found.append(Box("drafter x 1", [_takes("drafter", wanted), "its heads go to every engine"]))
    return found


def _engine_memory(required: Needs) -> str:
    return f"weights {size(required.engine_weights)}, KV cache {size(required.kv_cache)}"


def _engines(run: Run) -> str:
    return f"{run.elastic.min} to {run.elastic.max}" if run.elastic.on else str(run.rollout.replicas)


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
