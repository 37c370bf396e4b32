"""Runs `asyncrl` as a user would and reads what it leaves behind."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.buffer.reader import read_run

HERE = (sys.executable, "-c", "import sys; from pipelines.cli import main; sys.exit(main())")
"""The command of this interpreter, installed or only on its path."""


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
