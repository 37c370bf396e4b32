"""A real run with a tracker, killed and resumed; and what the recorder does with one that cannot write."""

import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config import Run
from asyncrl.system.run_directory import RunDirectory, read_events
from pipelines.cli import main
from pipelines.evaluate import Scores
from pipelines.recording.progress import Progress
from pipelines.recording.recorder import Recorder
from tests.support import quickstart_runs

FIGURES = dict.fromkeys(("sampled", "greedy", "reward", "passed", "interval"), 0.5)
SCORES = Scores(**FIGURES, by_size={}, median_tokens=9, p95_tokens=9, max_tokens=9)


def _steps(directory: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(directory / "tracking" / "tensorboard"), purge_orphaned_data=True).Reload()
    return [each.step for each in found.Scalars("step/reward")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_run_goes_on_in_the_same_curve(tmp_path: Path, model: Path) -> None:
    directory = tmp_path / "run"
    process = quickstart_runs.start(tmp_path, model, "trackers=[tensorboard]", "checkpoint.every=2", "steps=6")
    quickstart_runs.kill_after_step(process, tmp_path, 2)
    quickstart_runs.resume(directory)
    assert _steps(directory) == [0, 1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_write_is_counted_in_the_events(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    (directory.path / "tracking").touch()  # where its own directory would be
    run, console = Run(trackers=("tensorboard",)), Console(record=True)
    recorder = Recorder(run, directory, Progress(run, console), first_step=0)
    for after in range(3):
        recorder.evaluation(after, time.time(), SCORES)
    recorder.close()
    assert console.export_text().count("tracker tensorboard failed with FileExistsError") == 1
    assert [event["records"] for event in read_events(directory.events) if event["kind"] == "tracking_lost"] == [
        {"tensorboard": 3}
    ]
    assert recorder.evaluations.keys() == {0, 1, 2}


def test_a_missing_tracker_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asyncrl.config.trackers.find_spec", lambda name: None)
    assert main(["run", "trackers=[wandb]", f"root={tmp_path}", "name=mine"]) == 2
    assert "pip install 'asyncrl[wandb]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
