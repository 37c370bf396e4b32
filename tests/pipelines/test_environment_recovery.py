"""Conversations survive a kill: the resumed run trains on what was recorded, and goes on."""

from pathlib import Path

import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.data.untrusted import read_table
from asyncrl.types import GIVEN
from pipelines.cli.check import check
from tests.support.quickstart_runs import finish, kill_after_step, resume, run, start, summary

ENVIRONMENT = Path(__file__).parents[2] / "examples" / "own_environment.py"


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, model: Path) -> None:
    overrides = (f"environment.function={ENVIRONMENT}:environment", "environment.max_turns=3", "rollout.max_tokens=96")
    process = start(tmp_path, model, *overrides)
    kill_after_step(process, tmp_path, 1)
    resume(tmp_path / "run")
    result = summary(tmp_path)
    assert (result["status"], result["steps"], result["ledger"]["consumed"]) == ("ok", 4, 64)
    trajectories = list(read_run(tmp_path / "run" / "trajectories"))
    assert any(segment.version == GIVEN for t in trajectories for segment in t.segments[1:])
    assert all(sum(map(len, t.segments[1:])) <= 96 for t in trajectories)
    assert check(tmp_path / "run").sound


@pytest.mark.slow
def test_turns_find_what_earlier_ones_have_computed(tmp_path: Path, model: Path) -> None:
    """With two engines: a conversation whose turns went here and there would find nothing."""
    overrides = (f"environment.function={ENVIRONMENT}:environment", "environment.max_turns=3", "rollout.max_tokens=96")
    run(tmp_path, model, *overrides, "rollout.replicas=2", "rollout.group_size=2", "steps=2", "evaluation.every=0")
    row = read_table(tmp_path / "run" / "metrics.parquet").to_pylist()[-1]
    assert row["engines"]["engine"] == ["rollout-0", "rollout-1"]
    shared = sum(len(t.segments[0]) - 1 for t in read_run(tmp_path / "run" / "trajectories"))
    assert min(row["engines"]["cached_tokens"]) > 0
    assert row["cached_tokens"] > shared, "more than the prompts of all samples together"
    assert row["moved"] == 0


@pytest.mark.slow
def test_several_engines_on_ray(tmp_path: Path, model: Path) -> None:
    overrides = (f"environment.function={ENVIRONMENT}:environment", "environment.max_turns=3", "steps=2")
    finish(start(tmp_path, model, *overrides, "cluster=local", "rollout.replicas=2"))
