"""Whole runs: the loop, its bookkeeping, and what a kill leaves behind."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.buffer.reader import read_run
from asyncrl.system.run_directory import read_events
from asyncrl.training.checkpoint import numbered, read_manifest
from asyncrl.types import GIVEN
from tests.support import quickstart_runs

SUMMARY_KEYS = {
    "status", "steps", "samples_trained", "samples_per_second", "generated_tokens_per_second", "reward_first",
    "reward_last", "eval_first", "eval_last", "staleness_mean", "staleness_max", "trainer_wait_fraction",
    "first_optimizer_work_before_slowest_sample", "waste", "ledger", "weight_sync_seconds_mean",
    "acceptance_length_mean", "speculation_net_gain", "mismatch_kl", "ess",
}  # fmt: skip


def _consumed(root: Path) -> list[int]:
    """Group ids of the last checkpoint, one by one."""
    _, last = numbered(root / "run" / "checkpoints")[-1]
    return [group for first, end in read_manifest(last).consumed for group in range(first, end + 1)]


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("staleness", "on_update"), [(0, "keep"), (2, "keep"), (2, "recompute")], ids=["sync", "keep", "recompute"]
)
def test_a_run_is_complete_and_its_books_balance(tmp_path: Path, model: Path, staleness: int, on_update: str):
    quickstart_runs.run(tmp_path, model, f"max_staleness={staleness}", f"rollout.on_update={on_update}")
    summary = quickstart_runs.summary(tmp_path)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["status"] == "ok"
    assert summary["steps"] == 4
    assert summary["samples_trained"] == 4 * 4 * 4
    assert summary["staleness_max"] <= staleness
    ledger = summary["ledger"]
    parts = ledger["in_flight"] + ledger["buffered"] + ledger["consumed"] + sum(ledger["dropped"].values())
    assert ledger["leased"] == parts
    assert ledger["consumed"] == 64
    run = tmp_path / "run"
    assert (run.stat().st_mode & 0o777) == 0o700
    assert pq.read_table(run / "metrics.parquet").column("step").to_pylist() == [0, 1, 2, 3]
    assert len(_consumed(tmp_path)) == len(set(_consumed(tmp_path))) == 16


def test_engines_prove_that_they_hold_what_is_trained_before_anything_is_generated(tmp_path: Path, model: Path):
    quickstart_runs.run(tmp_path, model, "steps=1")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    first = next(event for event in events if event["kind"] == "publish")
    assert first["version"] == 0
    assert first["time"] <= min(event["time"] for event in events if event["kind"] in ("evaluation", "loop_started"))


def test_a_step_of_the_trainer_is_profiled(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    quickstart_runs.run(tmp_path, model, "steps=2", "trainer.profile_step=2")
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "step-2-rank-0.json.gz"
    assert b"Optimizer.step" in gzip.decompress(trace.read_bytes())
    assert f"{trace}: 0 s of travel between ranks" in caplog.text


def test_every_token_has_one_version_and_none_is_lost_or_doubled(tmp_path: Path, model: Path):
    """Answers run on across weight updates; their tokens, log-probabilities and versions stay in step."""
    quickstart_runs.run(tmp_path, model, "max_staleness=2", "steps=6", "flow.groups_per_step=2")
    trajectories = list(read_run(tmp_path / "run" / "trajectories"))
    assert max(Counter(t.slot for t in trajectories).values()) == 1
    spans = 0
    for trajectory in trajectories:
        versions = trajectory.versions
        sampled = versions != GIVEN
        assert np.all(np.diff(versions[sampled]) >= 0)
        assert np.all(trajectory.logprobs[sampled] <= 0)
        assert trajectory.sampled_tokens == int(sampled.sum())
        assert trajectory.finish in ("stop", "length")
        spans += len(set(versions[sampled].tolist())) > 1
    assert spans > 0, "no answer spanned a weight update: the run did not exercise partial rollouts"


def test_a_killed_run_resumes_and_trains_on_every_group_exactly_once(tmp_path: Path, model: Path):
    process = quickstart_runs.start(tmp_path, model, "steps=8")
    quickstart_runs.kill_after_step(process, tmp_path, 3)
    run = tmp_path / "run"
    before = {step: _weights(path) for step, path in numbered(run / "checkpoints")}
    # Go back further than needed, so that recorded steps are replayed as well as continued.
    for step, path in numbered(run / "checkpoints"):
        if step > 1:
            path.rename(path.with_name(f"old-{step}"))
    quickstart_runs.resume(run)
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["steps"] == 8
    assert summary["samples_trained"] == 8 * 16
    consumed = _consumed(tmp_path)
    dropped = sum(summary["ledger"]["dropped"].values())
    assert len(consumed) == len(set(consumed)) == 32
    assert summary["ledger"]["consumed"] == 128
    assert summary["ledger"]["leased"] == 128 + dropped
    assert pq.read_table(run / "metrics.parquet").column("step").to_pylist() == list(range(8))
    # Replayed steps give the weights of the run that was killed, bit for bit.
    after = {step: _weights(path) for step, path in numbered(run / "checkpoints")}
    for step in (2, 3):
        assert all(torch.equal(after[step][name], tensor) for name, tensor in before[step].items())
