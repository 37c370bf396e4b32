"""Bad rewards and a full disk: a counted drop or a clear error, and nothing lost."""

import resource
import signal
import subprocess
from pathlib import Path

import pytest

from asyncrl.buffer.reader import read_run, verify
from tests.pipelines import helpers

REWARDS = """
import time

def sometimes_raises(prompt, completion, answer):
    if prompt.startswith(("a1", "a2", "a3")):
        raise KeyError("no such answer")
    return float(completion == answer)

def sometimes_nan(prompt, completion, answer):
    return float("nan") if prompt.startswith(("a1", "a2", "a3")) else 0.5

def sometimes_hangs(prompt, completion, answer):
    if prompt.startswith("a1"):
        time.sleep(3600)
    return float(completion == answer)
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("sometimes_raises", "reward_error"),
        ("sometimes_nan", "reward_invalid"),
        ("sometimes_hangs", "reward_timeout"),
    ],
)
def test_a_bad_reward_is_a_counted_drop(tmp_path: Path, model: Path, function: str, reason: str):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    settings = (f"reward.function={file}:{function}", "reward.timeout_s=0.2", "evaluation.prompts=0")
    helpers.finish(helpers.start(tmp_path, model, *settings))
    summary = helpers.summary(tmp_path)
    ledger = summary["ledger"]
    assert summary["status"] == "ok"
    assert ledger["consumed"] == 64
    assert ledger["dropped"][reason] > 0
    assert ledger["leased"] == 64 + sum(ledger["dropped"].values())
    assert summary["waste"][reason] > 0


def _limit_file_size() -> None:
    """Stands for a full disk: it stops the trajectory log within the first step, before any weights are written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, resource.RLIM_INFINITY))


def test_a_full_disk_ends_the_run_with_its_reason_and_loses_nothing(tmp_path: Path, model: Path):
    command = helpers.command(tmp_path, model, "checkpoint.every=0", "steps=2", "flow.groups_per_step=32")
    failed = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, preexec_fn=_limit_file_size
    )
    assert failed.returncode == 6, failed.stdout + failed.stderr
    assert "nothing of this call was stored, make room" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert helpers.summary(tmp_path)["status"] == "failed"
    acknowledged = {t.slot for t in read_run(tmp_path / "run" / "trajectories")}
    assert acknowledged
    helpers.resume(tmp_path / "run")
    summary = helpers.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["ledger"]["consumed"] == 2 * 32 * 4
    assert acknowledged <= {t.slot for t in read_run(tmp_path / "run" / "trajectories")}
    assert verify(tmp_path / "run" / "trajectories").sound
