"""A real run on Ray in which the process of each role is killed with kill -9; the run goes on by itself."""

import os
import signal
import time
from pathlib import Path

import pytest

from asyncrl.system.run_directory import RunDirectory, read_events
from asyncrl.training.checkpoint import numbered, read_manifest
from tests.support import quickstart_runs


def _kill(role: str, run: Path, number: int) -> None:
    """SIGKILL the actor's process as soon as there is one that we have not killed."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for process in Path("/proc").iterdir():
            try:
                ours = process.name.isdigit() and f"ASYNCRL_TEST={run}".encode() in (process / "environ").read_bytes()
                if ours and (process / "cmdline").read_bytes().startswith(f"ray::{role}".encode()):
                    os.kill(int(process.name), signal.SIGKILL)
                    return
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError(f"no {role} to kill at point {number}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_role_is_killed_and_the_run_completes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    steps = 12
    process = quickstart_runs.start(
        tmp_path, model, "cluster=local", f"steps={steps}", "rollout.replicas=2", "rollout.group_size=8"
    )
    try:
        for number, role in enumerate(["RolloutActor", "RewardActor", "TrainerActor", "RolloutActor", "BufferActor"]):
            _reach(process, tmp_path, 1 + 2 * number)
            _kill(role, tmp_path, number)
        output = quickstart_runs.finish(process, timeout=300)
    finally:
        process.kill()
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["staleness_max"] <= 2
    ledger = summary["ledger"]
    assert ledger["consumed"] == steps * 4 * 8
    assert ledger["leased"] == ledger["consumed"] + ledger["buffered"] + ledger["in_flight"] + sum(
        ledger["dropped"].values()
    )
    kinds = [event["kind"] for event in read_events(RunDirectory.open(tmp_path / "run").events)]
    assert kinds.count("engine_lost") == 2, output
    assert kinds.count("restart") == 2, output
    _, last = numbered(tmp_path / "run" / "checkpoints")[-1]
    consumed = [group for first, end in read_manifest(last).consumed for group in range(first, end + 1)]
    assert len(consumed) == len(set(consumed)) == steps * 4
    assert abs(summary["mismatch_kl"]) < 1e-3


def _reach(process: "quickstart_runs.subprocess.Popen[str]", root: Path, step: int) -> None:
    wanted = root / "run" / "checkpoints" / f"step-{step}"
    deadline = time.monotonic() + 200
    while not wanted.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{wanted} did not appear"
        time.sleep(0.01)
