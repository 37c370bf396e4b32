"""Run directories that an older asyncrl wrote (`tests/fixtures/old_runs`, by commit 6d7dd1e) are read and continued.

`finished`: 6 steps on a local Ray. `killed`: 10 steps in one process with dynamic sampling, killed with SIGKILL in the
middle of step 8; its last checkpoint is that of step 5.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.models.checkpoint import WEIGHTS
from asyncrl.system.run_directory import read_events
from tests.support.command import asyncrl

OLD_RUNS = Path(__file__).parents[1] / "fixtures" / "old_runs"
RECORDED_ON = ("0x41", "0xd0c")
"""A Neoverse N1, by /proc/cpuinfo. Another kind of CPU may round the last bit of a sum differently."""
DIGEST = "e31a37e11872ec93ef9f837f62a946de"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of both, in the working directory, as their settings say."""
    shutil.copytree(OLD_RUNS, tmp_path / "runs")
    for noted in tmp_path.glob("runs/*/actors.json"):
        os.utime(noted, (1e9, 1e9))  # before any process that has the number of their driver here
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("finished", "96 = 0 in flight + 0 buffered + 96 consumed + 0 dropped\ncheckpoints"),
        (
            "killed",
            "276 = 24 in flight + 8 buffered + 128 consumed + 116 dropped (uninformative 116)\n"
            "dropped     116 uninformative: all rewards of the group were equal, so its advantages are zero",
        ),
    ],
)
def test_they_are_checked(runs: Path, name: str, slots: str) -> None:
    done = asyncrl("check", runs / name)
    assert done.code == 0, done.out + done.err
    assert slots in done.out
    assert "verdict     sound" in done.out


@pytest.mark.parametrize("name", ["finished", "killed"])
def test_they_are_reported_and_traced(runs: Path, name: str) -> None:
    done = asyncrl("report", runs / name)
    assert (done.code, done.out.strip()) == (0, f"runs/{name}/report.html"), done.err
    data = re.search(r'id="data">(.*?)</script>', (runs / name / "report.html").read_text(), re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["headline"]
    assert asyncrl("trace", runs / name).code == 0
    assert json.loads((runs / name / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("name", "said"), [("finished", "step 6/6 (100%)"), ("killed", "dead: its driver, process 4541")]
)
def test_they_are_watched(runs: Path, name: str, said: str) -> None:
    done = asyncrl("top", runs / name)
    assert done.code == 0, done.err
    assert said in " ".join(done.out.split())


def test_they_are_queried(runs: Path) -> None:
    for name, question, answer in (
        ("finished", "SELECT count(*) FROM trajectories WHERE fate = 'trained'", "96"),
        ("finished", "SELECT count(DISTINCT step) FROM metrics", "6"),
        ("killed", "SELECT count(*) FROM trajectories WHERE drop_reason = 'uninformative'", "116"),
    ):
        done = asyncrl("query", runs / name, question)
        assert done.code == 0, done.err
        assert f"│ {answer} " in done.out
    drops = asyncrl("query", runs / "killed", "drops_by_reason").out
    assert re.search(r"│ uninformative │ 116 +│ 116 +│ 1590 +│", drops), drops


def test_one_is_replayed_to_its_own_weights(runs: Path) -> None:
    done = asyncrl("replay", runs / "finished", "--out", "again")
    assert "6 steps again" in done.out, done.err
    if _like_then(runs / "finished"):
        assert done.code == 0
        assert done.out.splitlines()[-1] == f"identical: 6 steps again, weights {DIGEST}"
    recorded = load_file(runs / "finished" / "checkpoints" / "step-6" / WEIGHTS)
    again = load_file(Path("again") / "model" / WEIGHTS)
    assert recorded.keys() == again.keys()
    for name, tensor in recorded.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-3, atol=1e-5)


def _like_then(run: Path) -> bool:
    """Whether sums are rounded here as where the run was."""
    described = re.findall(r"CPU (?:implementer|part)\s*: (\w+)", Path("/proc/cpuinfo").read_text())
    (then,) = [event["found"] for event in read_events(run / "events.jsonl") if event["kind"] == "environment"]
    return tuple(described[:2]) == RECORDED_ON and torch.__version__ == then["torch"]


def test_the_killed_one_is_resumed_to_its_end(runs: Path) -> None:
    done = asyncrl("resume", runs / "killed")
    assert done.code == 0, done.out + done.err
    summary = json.loads((runs / "killed" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("ok", 10, 160)
    checked = asyncrl("check", runs / "killed")
    assert checked.code == 0, checked.out
    assert re.search(r"0 in flight \+ 0 buffered \+ 160 consumed \+ \d+ dropped", checked.out), checked.out


def test_one_whose_summary_and_metrics_are_damaged_is_resumed(runs: Path) -> None:
    """As a machine that lost its power may leave them."""
    run = runs / "killed"
    (run / "summary.json").write_bytes(b"")
    (run / "metrics.parquet").write_bytes((run / "metrics.parquet").read_bytes()[:-9])
    assert "VIOLATION   summary.json cannot be read" in asyncrl("check", run).out
    done = asyncrl("resume", run)
    assert done.code == 0, done.out + done.err
    assert "it is damaged-metrics.parquet now, and the rows begin again with step 6" in " ".join(done.out.split())
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("ok", 10, 160)
    checked = asyncrl("check", run)
    assert checked.code == 0, checked.out
    for words in (("report", run), ("query", run, "SELECT count(*) FROM metrics"), ("compare", run, runs / "finished")):
        assert asyncrl(*words).code == 0
