"""A run that prunes: every command still works on it and says what is gone."""

import json
import re
from pathlib import Path

import pytest

from tests.support import quickstart_runs
from tests.support.command import asyncrl


@pytest.mark.slow
def test_every_command_works_on_a_pruned_run(tmp_path: Path, model: Path) -> None:
    settings = ("steps=8", "evaluation.prompts=0", "buffer.keep=steps:2", "buffer.segment_bytes=2000")
    quickstart_runs.run(tmp_path, model, *settings, "checkpoint.keep=2", "events.max_bytes=4000")
    run = tmp_path / "run"
    assert (run / "events.jsonl").stat().st_size < 5000
    checked = asyncrl("check", run)
    assert checked.code == 0, checked.out
    pruned = re.search(r"pruned      the first (\d+) trajectories and the records of the first 0 steps", checked.out)
    assert pruned, checked.out
    assert int(pruned[1]) >= 4 * 16
    asked = asyncrl("query", run, "SELECT count(*) FROM trajectories")
    assert asked.code == 0
    assert f"the first {pruned[1]} trajectories" in asked.err
    assert asyncrl("report", run).code == 0
    data = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    assert data is not None
    assert f"the first {pruned[1]} trajectories" in json.loads(data[1])["run"]["when"]
    again = asyncrl("replay", run)
    assert again.code == 2
    assert f"cannot be replayed: the first {pruned[1]} trajectories" in again.err
    assert "record with buffer.keep=all to replay a run" in again.err
    newest = (run / "checkpoints" / "step-8" / "model.safetensors").read_bytes()
    (run / "checkpoints" / "step-8" / "model.safetensors").write_bytes(b"gone")
    said = quickstart_runs.resume(run)
    assert "step-7 is used" in " ".join(said.split())
    assert (run / "checkpoints" / "step-8" / "model.safetensors").read_bytes() == newest
    assert asyncrl("check", run).code == 0
