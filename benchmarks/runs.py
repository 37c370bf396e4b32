"""Runs `asyncrl` as a user would and reads what it leaves behind."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from asyncrl.buffer.reader import read_run

HERE = (sys.executable, "-c", "import sys; from pipelines.cli import main; sys.exit(main())")
"""The command of this interpreter, installed or only on its path."""
WARM_STEPS = 4
"""Left out of rates in runs that are long enough: kernels are compiled, and generation gets ahead once."""


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


def steady(directory: Path, *, ends: int = 0) -> Steady:
    """Without the first steps, nor the last `ends`, in which engines have nothing more to do."""
    columns = ["samples", "loop_seconds", "wait_seconds", "train_seconds", "sync_seconds", "generated_tokens"]
    rows = pq.read_table(directory / "metrics.parquet", columns=columns).to_pylist()
    warm = min(WARM_STEPS, len(rows) // 2)
    rows = rows[: len(rows) - min(ends, len(rows) // 4)]
    first, last, counted = rows[warm - 1], rows[-1], rows[warm:]
    seconds = last["loop_seconds"] - first["loop_seconds"]
    waited, trained, synced = (
        sum(row[name] for row in counted) for name in ("wait_seconds", "train_seconds", "sync_seconds")
    )
    return Steady(
        samples_per_second=sum(row["samples"] for row in counted) / seconds,
        tokens_per_second=(last["generated_tokens"] - first["generated_tokens"]) / seconds,
        trainer_wait=waited / seconds,
        step_seconds=seconds / len(counted),
        train_seconds=trained / len(counted),
        sync_seconds=synced / len(counted),
    )
