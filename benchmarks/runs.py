"""Runs `asyncrl` as a user would and reads what it leaves behind; and runs functions in processes of their own."""

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow.parquet as pq

from asyncrl.buffer.reader import read_deliveries, read_run

Result = TypeVar("Result")
END_S = 20.0
"""For a process that has answered to end."""
HERE = (sys.executable, "-c", "import sys; from pipelines.cli import main; sys.exit(main())")
"""The command of this interpreter, installed or only on its path."""
WARM_STEPS = 4
"""Left out of rates in runs that are long enough: kernels are compiled, and generation gets ahead once."""
AFTER_EVALUATION = 3
"""Steps that an evaluation makes faster: as many as may be written ahead with `max_staleness=2`."""


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """A run's loop without its first steps; seconds are those of a step."""

    samples_per_second: float
    tokens_per_second: float
    trainer_wait: float
    step_seconds: float
    train_seconds: float
    sync_seconds: float


def run(
    *overrides: str, asyncrl: str | None = None, experiment: str = "quickstart", directory: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """One run with these overrides, in a fresh directory unless one is named; returns its directory and summary."""
    directory = directory or Path(tempfile.mkdtemp(prefix="asyncrl-bench-")) / "run"
    place = (f"experiment={experiment}", f"root={directory.parent}", f"name={directory.name}")
    call("run", *place, *overrides, asyncrl=asyncrl)
    return directory, json.loads((directory / "summary.json").read_text())


def call(*words: str, asyncrl: str | None = None) -> None:
    subprocess.run([*((asyncrl,) if asyncrl else HERE), *words], check=True)


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call it in a fresh process, which is gone afterwards with all its memory; RuntimeError says why it failed."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call_back, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        found, error = ours.recv()
    except EOFError:
        process.join()
        found, error = None, f"the process ended with {process.exitcode}"
    process.join(END_S)
    if process.is_alive():  # libraries may leave threads behind
        process.kill()
        process.join()
    if error:
        raise RuntimeError(error)
    return found


def _call_back(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*arguments), ""))
    except Exception as error:  # of any kind: not all can be sent
        traceback.print_exc()
        pipe.send((None, f"{type(error).__name__}: {error}".splitlines()[0][:200]))


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps of a run."""

    seconds: float
    samples: int
    tokens: int
    """Of the answers trained on."""
    learned: float
    """Share of the groups whose rewards differ."""


def count(directory: Path, steps: range) -> Counted:
    """These steps alone, numbered from 0; the clock runs from the end of the one before."""
    columns = ["samples", "tokens", "loop_seconds"]
    rows = pq.read_table(directory / "metrics.parquet", columns=columns).to_pylist()
    given = read_deliveries(directory / "trajectories")
    groups = {group for step in steps for part in given[step] for group in part}
    rewards: dict[int, set[float]] = {}
    for trajectory in read_run(directory / "trajectories"):
        if trajectory.slot.group in groups:
            rewards.setdefault(trajectory.slot.group, set()).add(trajectory.reward)
    began = rows[steps.start - 1]["loop_seconds"] if steps.start else 0.0
    return Counted(
        seconds=rows[steps[-1]]["loop_seconds"] - began,
        samples=sum(rows[step]["samples"] for step in steps),
        tokens=sum(rows[step]["tokens"] for step in steps),
        learned=sum(len(found) > 1 for found in rewards.values()) / len(rewards),
    )


def answers(directory: Path) -> tuple[list[int], float]:
    """Lengths of a run's answers, and the share of its groups that are learned from.

    asyncrl spends no forward on a group whose rewards are all equal, for its gradient is zero. Samples per second mean
    little without this share.
    """
    lengths: list[int] = []
    rewards: dict[int, set[float]] = {}
    for trajectory in read_run(directory / "trajectories"):
        lengths.append(trajectory.sampled_tokens)
        rewards.setdefault(trajectory.slot.group, set()).add(trajectory.reward)
    return lengths, sum(len(found) > 1 for found in rewards.values()) / len(rewards)


def steady(directory: Path, *, ends: int = 0, every: int = 0) -> Steady:
    """Without the first steps, nor the last `ends`, in which engines have nothing more to do.

    In a run that evaluates after each `every` steps, also without those that follow an evaluation: see `undisturbed`.
    """
    columns = ["samples", "loop_seconds", "wait_seconds", "train_seconds", "sync_seconds", "generated_tokens"]
    rows = pq.read_table(directory / "metrics.parquet", columns=columns).to_pylist()
    warm = min(WARM_STEPS, len(rows) // 2)
    places = range(warm, len(rows) - min(ends, len(rows) // 4))
    counted = [place for place in places if undisturbed(place, every)] or list(places)

    def grown(name: str) -> float:
        return sum(rows[place][name] - rows[place - 1][name] for place in counted)

    def total(name: str) -> float:
        return sum(rows[place][name] for place in counted)

    seconds = grown("loop_seconds")
    return Steady(
        samples_per_second=total("samples") / seconds,
        tokens_per_second=grown("generated_tokens") / seconds,
        trainer_wait=total("wait_seconds") / seconds,
        step_seconds=seconds / len(counted),
        train_seconds=total("train_seconds") / len(counted),
        sync_seconds=total("sync_seconds") / len(counted),
    )


def undisturbed(step: int, every: int) -> bool:
    """Whether no evaluation reaches this step (from 0).

    The clock of a run stands still while a policy is evaluated, but engines go on with answers for the next steps,
    which then are faster than they would have been.
    """
    return not every or step < every or step % every >= AFTER_EVALUATION


class Point(msgspec.Struct, frozen=True):
    """One evaluation."""

    samples: int
    seconds: float
    held_out: float


def curve(directory: Path, every: int) -> list[Point]:
    """The held-out score by samples and seconds of training.

    Seconds are those of the loop, evaluations left out. Steps that an evaluation has made faster count as long as the
    others before the next evaluation.
    """
    rows = pq.read_table(directory / "metrics.parquet", columns=["samples", "loop_seconds"]).to_pylist()
    ends = [row["loop_seconds"] for row in rows]
    lengths = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
    scores = json.loads((directory / "summary.json").read_text())["evaluations"]
    points = [Point(0, 0.0, scores["0"]["sampled"])]
    samples, seconds, first = 0, 0.0, 0
    for step in sorted(int(step) for step in scores if int(step)):
        stretch = range(first, step)
        own = [lengths[place] for place in stretch if undisturbed(place, every)]
        seconds += len(stretch) * sum(own) / len(own) if own else sum(lengths[place] for place in stretch)
        samples += sum(rows[place]["samples"] for place in stretch)
        points.append(Point(samples, seconds, scores[str(step)]["sampled"]))
        first = step
    return points


def reached(points: Sequence[Point], score: float) -> Point | None:
    """When the score was first reached, between two evaluations in proportion; None if never."""
    for before, after in pairwise(points):
        if after.held_out >= score > before.held_out:
            share = (score - before.held_out) / (after.held_out - before.held_out)
            return Point(
                round(before.samples + share * (after.samples - before.samples)),
                before.seconds + share * (after.seconds - before.seconds),
                score,
            )
    return points[0] if points and points[0].held_out >= score else None
