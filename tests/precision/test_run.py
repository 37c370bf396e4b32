"""Short real runs in FP8, as a user starts them."""

from pathlib import Path
from typing import Any

from asyncrl.data.untrusted import read_table
from asyncrl.system.run_directory import read_events
from pipelines.compose import from_yaml
from tests.support import quickstart_runs

WORDS = ("rollout.precision=fp8_full", "algorithm.kl.coefficient=1e-6", "max_staleness=0")
"""A KL penalty has every answer measured, also where all of a group are wrong."""


def _shares(root: Path) -> list[dict[str, Any]]:
    rows = read_table(root / "run" / "metrics.parquet").to_pylist()
    return [share for row in rows for share in row["shares"] if share["by"] == "precision"]


def test_a_run_tells_its_mismatch_by_precision(tmp_path: Path, model: Path) -> None:
    quickstart_runs.run(tmp_path, model, *WORDS)
    shares = _shares(tmp_path)
    assert [share["value"] for share in shares] == ["fp8_full"] * 4
    assert all(1e-6 < share["mismatch_k3"] < 0.05 for share in shares)


def test_a_run_falls_back_and_says_so_once(tmp_path: Path, model: Path) -> None:
    """The bound lies between the mismatch of FP8 and that of fp32."""
    bounds = ("sentinel.max_kl=1e-5", "sentinel.on_fp8=fall_back", "trainer.lr=1e-9")
    output = quickstart_runs.run(tmp_path, model, *WORDS, *bounds)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["figure"] for event in events if event["kind"] == "alarm"].count("fp8_fallback") == 1
    assert " ".join(output.split()).count("they go on without FP8 from now on") == 1
    shares = _shares(tmp_path)
    assert (shares[0]["value"], shares[-1]["value"]) == ("fp8_full", "fp32")
    assert shares[0]["mismatch_k3"] > 100 * shares[-1]["mismatch_k3"]


def test_or_starts_again_without_fp8(tmp_path: Path, model: Path) -> None:
    """As engines must that cannot leave FP8 while they run; what was sampled in FP8 after the checkpoint is kept."""
    bounds = ("sentinel.max_kl=1e-5", "sentinel.on_fp8=restart", "trainer.lr=1e-9")
    output = quickstart_runs.run(tmp_path, model, *WORDS, *bounds)
    assert "the run starts again from its last checkpoint, without FP8" in " ".join(output.split())
    (left,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "fp8_left"]
    assert "is past sentinel.max_kl=1e-05 with FP8 rollouts" in left["reason"]
    assert from_yaml(tmp_path / "run" / "config.yaml").rollout.precision == "fp32"
    shares = _shares(tmp_path)
    assert (shares[0]["value"], shares[-1]["value"]) == ("fp8_full", "fp32")
