"""Whole runs with what an algorithm or the staleness controller changes outside the learner."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support import quickstart_runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss.py"


def rows(root: Path) -> list[dict[str, object]]:
    return pq.read_table(root / "run" / "metrics.parquet").to_pylist()


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=ppo",),
        ("algorithm=gspo", "correction=bypass_k3_rs"),
        ("algorithm=reinforce_pp", "algorithm.kl.coefficient=0.01", "algorithm.kl.placement=reward"),
        ("algorithm=custom", f"algorithm.function={EXAMPLE}:loss"),
        ("correction=custom", f"correction.function={EXAMPLE}:weights"),
    ],
    ids=["ppo", "gspo", "reinforce_pp", "own_loss", "own_correction"],
)
def test_algorithms_run_and_report(tmp_path: Path, model: Path, overrides: tuple[str, ...]) -> None:
    quickstart_runs.run(tmp_path, model, *overrides)
    assert quickstart_runs.summary(tmp_path)["status"] == "ok"
    for row in rows(tmp_path):
        assert not row["skipped"]
        for figure in ("rho_p1", "rho_p50", "rho_p99", "chi2_token", "chi2_sequence", "ppl_gap", "rejected_samples"):
            value = row[figure]
            assert isinstance(value, float)
            assert math.isfinite(value)
        shares = row["shares"]
        assert isinstance(shares, list)
        assert sum(s["tokens"] for s in shares if s["by"] == "age") == sum(
            s["tokens"] for s in shares if s["by"] == "precision"
        )


def test_dynamic_sampling_replaces_groups_without_contrast(tmp_path: Path, model: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(prompt, completion, answer):\n    return float(len(completion) % 8 == 0)\n")
    quickstart_runs.run(tmp_path, model, "algorithm=dapo", "steps=2", f"reward.function={judge}:reward")
    summary = quickstart_runs.summary(tmp_path)
    ledger = summary["ledger"]
    assert ledger["dropped"]["uninformative"] > 0
    assert ledger["consumed"] == 2 * 4 * 4
    assert ledger["leased"] == ledger["in_flight"] + ledger["buffered"] + ledger["consumed"] + sum(
        ledger["dropped"].values()
    )


def test_the_controller_moves_the_bound_and_the_cadence_within_the_limit(tmp_path: Path, model: Path) -> None:
    """A band far below any ESS: the controller loosens as far as it may. Rewards have to differ: a step without any
    advantage measures nothing, and moves nothing."""
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(prompt, completion, answer):\n    return float(len(completion) % 2)\n")
    loose = ("staleness=ess", "staleness.low=0.01", "staleness.high=0.02", "staleness.window=1", "max_staleness=2")
    quickstart_runs.run(tmp_path, model, *loose, "steps=8", f"reward.function={judge}:reward")
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["staleness_max"] <= 2
    assert max(row["publish_every"] for row in rows(tmp_path)) == 2  # type: ignore[type-var]
