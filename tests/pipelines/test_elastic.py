"""A real run on Ray whose pool grows while the trainer waits, loses an engine to kill -9, and shrinks again."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.resources import Resources
from actors.runtime.spawn import InProcess
from asyncrl.errors import EngineError
from asyncrl.system.run_directory import RunDirectory, read_events
from benchmarks.phases import SLOW
from pipelines import train
from pipelines.cli.chaos import MARK, Processes
from pipelines.cli.check import check
from pipelines.compose import compose
from pipelines.fleet.cluster_offer import here
from pipelines.recording.progress import Progress
from pipelines.recording.recorder import Recorder
from pipelines.supervision.stopping import Stopping
from tests.support import quickstart_runs


class Unlucky(InProcess):
    """A cluster whose first new engine fails to start, and whose second breaks the run if it is told to."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks
        self.asked: list[str] = []

    async def spawn(self, name: str, resources: Resources, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rollout-") and name != "rollout-0":
            self.asked.append(name)
            if name == "rollout-1":
                raise EngineError("rollout-1 has no luck")
            if self._breaks:
                raise ValueError("a mistake of ours")
        return await super().spawn(name, resources, cls, *args, **kwargs)


@pytest.mark.parametrize("breaks", [False, True])
def test_an_engine_that_does_not_come_changes_nothing_and_every_wish_is_taken_back(
    breaks: bool, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[int] = []
    monkeypatch.setattr("pipelines.fleet.place.expecting", lambda run, offer: wishes.append)
    run = compose(
        [
            *(
                *quickstart_runs.SMALL,
                f"model.path={model}",
                f"root={tmp_path}",
                "name=run",
                "steps=12",
                "evaluation.prompts=0",
            ),
            *("elastic.max=2", "elastic.interval_s=0.1", "elastic.window=1", "elastic.cooldown_s=0"),
            *("elastic.grow_above=0", "elastic.join_timeout_s=0.2"),
        ]
    )
    directory, spawner = RunDirectory.create(tmp_path / "run"), Unlucky(breaks)
    with Progress(run) as progress:
        recorder = Recorder(run, directory, progress, first_step=0)
        stopping = Stopping(run, print, print)
        training = train._train(run, here(run), directory, recorder, spawner, model, None, stopping, resumed=False)
        if breaks:
            with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="a mistake of ours"), flatten_subgroups=True):
                asyncio.run(training)
        else:
            assert asyncio.run(training)["ledger"]["consumed"] == 12 * 16
        recorder.close()
    failed = _events(tmp_path, "engine_not_joined")
    assert [(event["engine"], event["reason"]) for event in failed[:1]] == [("rollout-1", "rollout-1 has no luck")]
    assert spawner.asked[:2] == ["rollout-1", "rollout-2"], "it is tried again later, under a new name"
    assert wishes[0] == 1
    assert max(wishes) == 2
    assert wishes[-1] == 0, "nothing of the run is left with the autoscaler"


SETTINGS = (
    *("cluster=local", "steps=44", "rollout.group_size=4", "checkpoint.every=0", "evaluation.prompts=0"),
    *("engine=fake", "engine.max_batch=8", "engine.step_seconds=0.02", "engine.vocabulary=32"),
    *("algorithm=custom", "algorithm.function=benchmarks.phases:loss", "reward.function=benchmarks.phases:reward"),
    *(
        "correction=none",
        "sentinel.max_kl=0",
        "weights.probe=false",
        "concurrency.adaptive=true",
        "concurrency.start=8",
    ),
    *("elastic.max=2", "elastic.interval_s=0.5", "elastic.window=2", "elastic.cooldown_s=0", "recovery.timeout_s=60"),
)


def _events(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(root / "run" / "events.jsonl") if event["kind"] == kind]


def _wait(process: "quickstart_runs.subprocess.Popen[str]", reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 200
    while not reached():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_pool_grows_loses_an_engine_and_shrinks_and_nothing_is_lost(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    monkeypatch.setenv(SLOW, str(slow))
    monkeypatch.setenv(MARK, str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    process = quickstart_runs.start(tmp_path, model, *SETTINGS)
    try:
        _wait(process, lambda: bool(_events(tmp_path, "engine_joined")), "a second engine")
        killed = Processes(tmp_path / "run").of("rollout-0")
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        _wait(process, lambda: bool(_events(tmp_path, "engine_lost")), "the death of the first")
        slow.touch()
        _wait(process, lambda: bool(_events(tmp_path, "engine_left")), "an engine's leave")
        slow.unlink()
        quickstart_runs.finish(process, timeout=150)
    finally:
        process.kill()
        process.communicate()
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert (summary["replicas_min"], summary["replicas_max"]) == (1, 2)
    assert summary["ledger"]["dropped"] == {}, "every answer that was handed over was finished"
    assert summary["ledger"]["consumed"] == summary["ledger"]["leased"] == 44 * 16
    assert check(RunDirectory.open(tmp_path / "run").path).sound
    joined = _events(tmp_path, "engine_joined")[0]
    before = [event["version"] for event in _events(tmp_path, "publish") if event["time"] < joined["time"]]
    assert joined["version"] is not None, "it found the weights without a publication to everybody"
    assert joined["version"] >= max(before, default=0)
    assert msgspec.json.decode((tmp_path / "run" / "summary.json").read_bytes())["staleness_max"] <= 2
