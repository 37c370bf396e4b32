"""A run on a real Ray whose engine hangs or dies: it stops with the reason, in time, and leaves no process."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import quickstart_runs

DEADLINE = 5.0


def _rollout_of(run: Path) -> int | None:
    """The process of the run's rollout actor."""
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and f"ASYNCRL_TEST={run}".encode() in (process / "environ").read_bytes()
                and (process / "cmdline").read_bytes().startswith(b"ray::RolloutActor")
            ):
                return int(process.name)
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.nightly), pytest.param(signal.SIGKILL, id="dies")],
)
def test_the_run_stops_with_the_reason(
    kind: signal.Signals, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    limits = (f"weights.deadline_s={DEADLINE}", "flow.stall_timeout_s=30", "recovery.max_restarts=0")
    process = quickstart_runs.start(tmp_path, model, "cluster=local", "steps=500", "max_staleness=0", *limits)
    first = tmp_path / "run" / "checkpoints" / "step-1"
    deadline = time.monotonic() + 120
    while not first.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rollout = _rollout_of(tmp_path)
    assert rollout is not None
    os.kill(rollout, kind)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "failed"
    # Mostly it happens in mid-sync; an engine that hangs in mid-answer is noticed by the buffer.
    assert "rollout-0" in summary["error"] or summary["error"].startswith("StallError"), output
    while _rollout_of(tmp_path) is not None:
        assert time.monotonic() < deadline + 120, "the engine outlives its run"
        time.sleep(0.1)
