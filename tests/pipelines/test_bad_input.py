"""Bad rewards and a full disk: a counted drop or a clear error, and nothing lost."""

import resource
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.log import HEADER_SIZE
from asyncrl.buffer.reader import read_run, verify
from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from tests.support import quickstart_runs

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
    quickstart_runs.run(tmp_path, model, *settings)
    summary = quickstart_runs.summary(tmp_path)
    ledger = summary["ledger"]
    assert summary["status"] == "ok"
    assert ledger["consumed"] == 64
    assert ledger["dropped"][reason] > 0
    assert ledger["leased"] == 64 + sum(ledger["dropped"].values())
    assert summary["waste"][reason] > 0


def _fill_disk_after_first_trajectories(process: "subprocess.Popen[str]", run: Path) -> None:
    """As a limit on the size of files, that trajectories outgrow and the small model's weights do not. Not from the
    start: how many of the first wave are written at once is a matter of luck, and all of them are too many."""
    deadline = time.monotonic() + 100
    while not any(log.stat().st_size > HEADER_SIZE for log in run.glob("trajectories/trajectories-*.open")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing was stored"
        time.sleep(0.01)
    (run_process,) = psutil.Process(process.pid).children()  # of the command, which only supervises it
    resource.prlimit(run_process.pid, resource.RLIMIT_FSIZE, (80_000, resource.RLIM_INFINITY))


def test_a_full_disk_ends_the_run_with_its_reason_and_loses_nothing(tmp_path: Path):
    small = WarmStart(hidden_size=32, layers=1, intermediate_size=32, steps=40)
    model = make_model(small, ChainsTask(), 0, tmp_path / "model")
    command = quickstart_runs.command(tmp_path, model, "checkpoint.every=0", "steps=4", "flow.groups_per_step=32")
    failed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _fill_disk_after_first_trajectories(failed, tmp_path / "run")
    output, errors = failed.communicate(timeout=100)
    assert failed.returncode == 6, output + errors
    assert "nothing of this call was stored, make room" in errors
    assert "Traceback" not in errors
    assert quickstart_runs.summary(tmp_path)["status"] == "failed"
    acknowledged = {t.slot for t in read_run(tmp_path / "run" / "trajectories")}
    assert acknowledged
    quickstart_runs.resume(tmp_path / "run")
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["ledger"]["consumed"] == 4 * 32 * 4
    assert acknowledged <= {t.slot for t in read_run(tmp_path / "run" / "trajectories")}
    assert verify(tmp_path / "run" / "trajectories").sound
