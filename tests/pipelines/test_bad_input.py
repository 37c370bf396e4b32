"""Bad rewards and a full disk: a counted drop or a clear error, and nothing lost."""

import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.log import HEADER_SIZE
from asyncrl.buffer.reader import read_run, verify
from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.data.untrusted import read_table
from asyncrl.training.warm_start import make_model
from tests.support import quickstart_runs
from tests.support.command import asyncrl
from tests.support.full_disk import file_size_limit

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "old_runs" / "finished"

REWARDS = """
import time

def sometimes_raises(prompt, completion, answer):
    if prompt.startswith(("a1", "a2", "a3")):
        raise KeyError("no such answer")
    return float(completion == answer)

def one_in_eight_raises(prompt, completion, answer):
    if sum(completion.encode()) % 8 == 0:
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


@pytest.mark.slow
def test_the_rest_of_groups_is_trained_on_and_the_run_is_replayed_and_resumed_to_the_bit(tmp_path: Path, model: Path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    settings = (f"reward.function={file}:one_in_eight_raises", "flow.incomplete=train_rest", "evaluation.prompts=0")
    quickstart_runs.run(tmp_path, model, *settings)
    ledger = quickstart_runs.summary(tmp_path)["ledger"]
    assert 48 <= ledger["consumed"] < 64
    assert ledger["dropped"]["reward_error"] > 0
    rows = read_table(tmp_path / "run" / "metrics.parquet")
    assert sum(rows["incomplete_groups"].to_pylist()) > 0
    assert sum(rows["samples"].to_pylist()) == ledger["consumed"]
    assert asyncrl("check", tmp_path / "run").code == 0
    assert asyncrl("replay", tmp_path / "run").out.splitlines()[-1].startswith("identical: 4 steps again")
    last = (tmp_path / "run" / "checkpoints" / "step-4" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    quickstart_runs.resume(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-4" / "model.safetensors").read_bytes() == last
    assert asyncrl("check", tmp_path / "run").code == 0


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


@pytest.mark.slow
def test_a_disk_that_has_no_room_for_a_checkpoint_ends_the_run_like_any_full_disk(tmp_path: Path, model: Path):
    command = quickstart_runs.command(tmp_path, model, "steps=3", "evaluation.prompts=0")
    with file_size_limit(3 * (model / "model.safetensors").stat().st_size // 2):  # the optimizer's state is larger
        done = asyncrl(*command[1:])
    assert done.code == 6, done.out + done.err
    assert "make room and try again (asyncrl resume)" in done.err
    assert "checkpoints/.step-1.partial" in done.err
    assert quickstart_runs.summary(tmp_path)["error"].startswith("StorageError")
    quickstart_runs.resume(tmp_path / "run")
    assert quickstart_runs.summary(tmp_path)["ledger"]["consumed"] == 3 * 4 * 4
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(tmp_path: Path, model: Path):
    """To the weights of a run whose checkpoint was never damaged."""
    quickstart_runs.run(tmp_path, model, "steps=3", "evaluation.prompts=0")
    saved = tmp_path / "run" / "checkpoints"
    good = (saved / "step-3" / "model.safetensors").read_bytes()
    (saved / "step-3" / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    checked = asyncrl("check", tmp_path / "run")
    assert checked.code == 1
    assert "VIOLATION   checkpoint step-3 is damaged: the checksum of model.safetensors does not match" in checked.out
    said = quickstart_runs.resume(tmp_path / "run")
    assert "step-3 is damaged: the checksum of model.safetensors does not match; step-2 is used" in " ".join(
        said.split()
    )
    assert (saved / "step-3" / "model.safetensors").read_bytes() == good
    assert (saved / "damaged-step-3").is_dir()
    assert asyncrl("check", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("metrics.parquet", lambda raw: raw[:-1], "metrics.parquet cannot be read"),
        ("events.jsonl", lambda raw: raw.replace(b'":"fleet', b'";"fleet', 1), "events.jsonl line 2 is damaged"),
    ],
)
def test_damaged_records_are_found(tmp_path: Path, file: str, change: Callable[[bytes], bytes], said: str):
    shutil.copytree(OLD_RUN, tmp_path / "run")
    assert asyncrl("check", tmp_path / "run").code == 0
    path = tmp_path / "run" / file
    path.write_bytes(change(path.read_bytes()))
    done = asyncrl("check", tmp_path / "run")
    assert done.code == 1
    assert said in done.out
