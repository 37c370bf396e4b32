"""A run on Ray whose trainer has two ranks, one of which is killed; and what is left is continued by one rank."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from asyncrl.models.checkpoint import load_model
from asyncrl.system.run_directory import RunDirectory, read_events
from tests.support import quickstart_runs


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "shared",
    [
        pytest.param((), id="samples"),
        pytest.param(("trainer.context_parallel=2",), id="tokens", marks=pytest.mark.nightly),
        pytest.param(("trainer.replicas=2",), id="replicas", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_is_killed_and_all_of_them_come_back(shared: tuple[str, ...], tmp_path: Path, model: Path) -> None:
    process = quickstart_runs.start(tmp_path, model, "cluster=local", "trainer.ranks=2", "steps=5", *shared)
    run = tmp_path / "run"
    try:
        deadline = time.monotonic() + 200
        while not (run / "checkpoints" / "step-2").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(json.loads((run / "actors.json").read_bytes())["trainer-1"], signal.SIGKILL)
        output = quickstart_runs.finish(process, timeout=200)
    finally:
        process.kill()
    assert quickstart_runs.summary(tmp_path)["status"] == "ok"
    assert quickstart_runs.summary(tmp_path)["ledger"]["consumed"] == 5 * 4 * 4
    restarts = [event for event in read_events(RunDirectory.open(run).events) if event["kind"] == "restart"]
    assert len(restarts) == 1, output
    assert restarts[0]["reason"].startswith("actor trainer-1 died")
    load_model(run / "checkpoints" / "step-5")  # two files, as a sharded Hugging Face checkpoint

    config = run / "config.yaml"
    one = config.read_text()
    for setting in ("ranks", "replicas", "context_parallel"):
        one = one.replace(f"{setting}: 2", f"{setting}: 1")
    config.write_text(one.replace("steps: 5", "steps: 6"))
    quickstart_runs.resume(run)
    assert quickstart_runs.summary(tmp_path)["steps"] == 6
    assert (run / "checkpoints" / "step-6" / "optimizer.safetensors").exists()
