"""Whole runs with several sources and a curriculum: what is asked, by which name, and what a kill changes."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.observe.query.tables import open_run, read_buffer
from asyncrl.tasks.registry import make_task
from asyncrl.training.checkpoint import numbered
from pipelines.cli.check import check
from pipelines.compose import from_yaml
from pipelines.replay import replay
from tests.support import quickstart_runs

MIXED = (
    "task=mix",
    "task.sources.short={weight: 3, task: {type: chains, median_size: 2, max_size: 3}}",
    "task.sources.long={weight: 1, task: {type: chains, median_size: 4, max_size: 6}}",
)
CURRICULUM = (*MIXED, "curriculum.band=[0.1,0.9]", "curriculum.replay=0.5", "curriculum.weights=follow")
SYNCHRONOUS = ("max_staleness=0", "flow.groups_per_take=4")


def asked(run: Path) -> list[int]:
    """The prompt of each group, in the order of admission."""
    _, outcomes = read_buffer(run / "trajectories")
    return outcomes.prompts.tolist()


def killed_and_resumed(root: Path, model: Path, *overrides: str) -> tuple[Path, list[int]]:
    """The run, and what it had asked when it was killed; it begins again from its first checkpoint."""
    process = quickstart_runs.start(root, model, "steps=8", *overrides)
    quickstart_runs.kill_after_step(process, root, 4)
    run = root / "run"
    before = asked(run)
    for step, path in numbered(run / "checkpoints"):
        if step > 1:
            shutil.rmtree(path)
    quickstart_runs.resume(run)
    return run, before


def is_sound(run: Path) -> None:
    settings = from_yaml(run / "config.yaml")
    task = make_task(settings.task, settings.seed)
    prompts = asked(run)
    for trajectory in read_run(run / "trajectories"):
        assert trajectory.prompt == task.prompt("train", prompts[trajectory.slot.group]).uid
    assert check(run).sound
    assert replay(run, []).identical


def test_a_killed_run_asks_what_it_would_have_asked(tmp_path: Path, model: Path) -> None:
    """Synchronous, so that nothing depends on time: also what is chosen after the kill is the same."""
    quickstart_runs.run(tmp_path / "whole", model, "steps=8", *CURRICULUM, *SYNCHRONOUS)
    whole = asked(tmp_path / "whole" / "run")
    run, before = killed_and_resumed(tmp_path / "killed", model, *CURRICULUM, *SYNCHRONOUS)
    assert len(before) >= 16
    assert asked(run) == whole
    assert before == whole[: len(before)]
    assert len(set(whole)) < len(whole) == 32, "some were asked again"
    is_sound(run)


def test_choices_made_before_a_kill_are_kept_and_recorded_deliveries_repeated(tmp_path: Path, model: Path) -> None:
    run, before = killed_and_resumed(tmp_path, model, *CURRICULUM, "rollout.replicas=2")
    assert asked(run)[: len(before)] == before
    assert len(asked(run)) > len(before) >= 16
    is_sound(run)


def test_sources_are_told_apart_in_training_and_in_evaluations(tmp_path: Path, model: Path) -> None:
    quickstart_runs.run(tmp_path, model, *MIXED)
    run = tmp_path / "run"
    assert asked(run) == list(range(len(asked(run)))), "without a curriculum in the order of the task"
    sources = Counter(trajectory.prompt.split("/")[0] for trajectory in read_run(run / "trajectories"))
    assert sources["short"] == pytest.approx(3 * sources["long"], rel=0.4)
    with open_run(run) as tables:
        found = tables.execute("SELECT step, sampled, by_source FROM evaluations ORDER BY step").fetchall()
    assert [step for step, _, _ in found] == [0, 4]
    for _, sampled, by_source in found:
        assert set(by_source) == {"short", "long"}
        assert 12 * by_source["short"] + 4 * by_source["long"] == pytest.approx(16 * sampled)
    evaluations = json.loads((run / "summary.json").read_text())["evaluations"]
    assert evaluations["0"]["by_source"] == found[0][2]
