"""Twins: a run that is killed at seeded points and resumed is, bit for bit, the run that was never killed.

What makes a run on a CPU a function of its seed: synchronous (`max_staleness=0`), whole steps taken at once in the
order of admission, one answer decoded at a time (a batch of another shape rounds differently), and no deadline met.
"""

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.buffer.reader import read_deliveries
from asyncrl.models.checkpoint import WEIGHTS
from asyncrl.training.checkpoint import numbered
from asyncrl.weights.manifest import digest_tensors
from pipelines.cli.check import check
from tests.pipelines.test_replay import graded
from tests.support import quickstart_runs

DETERMINISTIC = (
    "max_staleness=0",
    "flow.groups_per_step=2",
    "flow.groups_per_take=2",
    "rollout.group_size=3",
    "rollout.max_tokens=24",
    "engine.max_batch=1",
    "evaluation.prompts=0",
)


def kill_at(process: "subprocess.Popen[str]", run: Path, point: str) -> bool:
    """SIGKILL the driver as soon as `point` is in the run directory; False if the run was over before."""
    while process.poll() is None:
        if any(run.glob(point)):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.communicate()
    return process.returncode != 0


def digest(run: Path) -> str:
    _, last = numbered(run / "checkpoints")[-1]
    return digest_tensors(sorted(load_file(last / WEIGHTS).items()))


def points(rng: random.Random, steps: int) -> Iterator[str]:
    """While a checkpoint is written, and right after one: early in the next step."""
    for step in range(1, steps):
        if rng.random() < 0.6:
            yield f"checkpoints/.step-{step}.partial/*"
        else:
            yield f"checkpoints/step-{step}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "steps"), [(0, 3), (1, 6), pytest.param(2, 6, marks=pytest.mark.nightly)])
def test_killed_and_resumed_is_never_killed(tmp_path: Path, model: Path, seed: int, steps: int) -> None:
    settings = (*DETERMINISTIC, f"steps={steps}", f"seed={seed}", graded(tmp_path))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quickstart_runs.run(whole, model, *settings)
    process, kills = quickstart_runs.start(broken, model, *settings), 0
    for point in points(random.Random(seed), steps):
        kills += kill_at(process, broken / "run", point)
        process = quickstart_runs.start_resume(broken / "run")
    quickstart_runs.finish(process)
    assert kills >= steps // 2, "the run was over before it could be killed"
    assert check(broken / "run").sound
    assert read_deliveries(broken / "run" / "trajectories") == read_deliveries(whole / "run" / "trajectories")
    assert digest(broken / "run") == digest(whole / "run")
