"""The same run on a real local Ray: killed with kill -9, then resumed."""

import time
from pathlib import Path

import pytest

from asyncrl.training.checkpoint import numbered, read_manifest
from tests.support import quickstart_runs
from tests.support.real_vllm import needs_vllm

RAYS_AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""They end by themselves, but first try for a minute to report to the head node that died with the driver."""


def _processes_of(run: Path) -> list[int]:
    """Every process that descends from the run, by a variable in its environment, but for Ray's two agents."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            ours = process.name.isdigit() and f"ASYNCRL_TEST={run}".encode() in (process / "environ").read_bytes()
            if ours and not (process / "cmdline").read_bytes().startswith(RAYS_AGENTS):
                found.append(int(process.name))
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return found


@pytest.mark.timeout(550)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=[needs_vllm, pytest.mark.nightly])])
def test_kill_the_driver_then_resume_on_ray(engine: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    limits = ["engine.eager=true"] if engine == "vllm" else []
    process = quickstart_runs.start(tmp_path, model, "cluster=local", "steps=6", f"engine={engine}", *limits)
    quickstart_runs.kill_after_step(process, tmp_path, 2)
    deadline = time.monotonic() + 60
    while left := _processes_of(tmp_path):
        assert time.monotonic() < deadline, f"processes {left} outlive the driver that was killed"
        time.sleep(0.2)
    quickstart_runs.resume(tmp_path / "run")
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["staleness_max"] <= 2
    assert summary["ledger"]["consumed"] == 6 * 16
    assert summary["ledger"]["leased"] == 6 * 16 + sum(summary["ledger"]["dropped"].values())
    _, last = numbered(tmp_path / "run" / "checkpoints")[-1]
    consumed = [group for first, end in read_manifest(last).consumed for group in range(first, end + 1)]
    assert len(consumed) == len(set(consumed)) == 24
    assert abs(summary["mismatch_kl"]) < 1e-3
