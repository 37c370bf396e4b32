"""Whole runs with a drafter: it learns beside the policy, its heads reach the engines, and a kill costs little."""

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from actors.drafter.actor import STATE
from asyncrl.buffer.reader import read_run
from asyncrl.drafting.bandit import Range
from asyncrl.drafting.checkpoint import load_head
from asyncrl.models.config import read_config
from asyncrl.system.run_directory import read_events
from tests.support import quickstart_runs

QUICK = (
    "drafter.tokens=3",
    "drafter.adaptive.on=false",
    "drafter.training.batch_tokens=200",
    "drafter.training.held_out=0.3",
    "drafter.training.publish_every=0.02",
    "steps=8",
)
"""Looks at a head after every update or two, and always drafts."""


@pytest.fixture
def judge(tmp_path: Path) -> str:
    """Rewards that differ within a group: from groups of equal ones nothing is learned, and no forward is made."""
    file = tmp_path / "judge.py"
    file.write_text("def reward(prompt, completion, answer):\n    return float(len(completion) % 2)\n")
    return f"reward.function={file}:reward"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", pytest.param("eagle3", marks=pytest.mark.nightly)])
def test_a_fresh_head_learns_and_reaches_the_engine(kind: str, tmp_path: Path, model: Path, judge: str):
    exact = "rollout.on_update=recompute"  # so that a token of the newest version has nothing of older ones behind it
    quickstart_runs.run(tmp_path, model, f"drafter={kind}", *QUICK, judge, exact)
    summary = quickstart_runs.summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["acceptance_length_mean"] >= 1
    assert len(summary["acceptance_by_position"]) <= 3
    drafter = summary["drafter"]
    assert drafter["updates"] > 0
    assert drafter["windows"] > 0
    published = [
        e["version"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "drafter_published"
    ]
    assert published == list(range(1, len(published) + 1))
    assert published, "no head was ever better than the fresh one"
    assert load_head(tmp_path / "run" / "drafter", read_config(model)).config.kind == kind
    assert summary["samples_trained"] == 8 * 16
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    newest = [share for row in rows for share in row["shares"] if (share["by"], share["value"]) == ("age", "0")]
    assert newest
    assert all(abs(share["mismatch_kl"]) < 1e-5 for share in newest), "log-probabilities are the policy's"


@pytest.mark.slow
def test_a_head_learns_beside_adapters(tmp_path: Path, model: Path, judge: str):
    """Of the policy only they are published; what a head shares with it does not change."""
    said = quickstart_runs.run(tmp_path, model, "drafter=eagle", *QUICK, judge, "trainer.lora.rank=4")
    assert "Traceback" not in said
    kinds = [event["kind"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert "drafter_published" in kinds
    assert "drafter_failed" not in kinds


@pytest.mark.slow
def test_a_head_learns_from_what_the_engine_gives(tmp_path: Path, model: Path):
    """The rewards of a group are all equal here, so the trainer has nothing to learn from and makes no forward."""
    file = tmp_path / "judge.py"
    file.write_text("def reward(prompt, completion, answer):\n    return 1.0\n")
    source = ("drafter.training.source=rollout", f"reward.function={file}:reward")
    quickstart_runs.run(tmp_path, model, "drafter=eagle3", *QUICK, *source)
    summary = quickstart_runs.summary(tmp_path)
    assert summary["drafter"]["updates"] > 0
    assert summary["drafter"]["version"] > 0, "no head was ever better than the fresh one"
    assert summary["drafter"]["bytes_per_token"] > 0


@pytest.mark.slow
def test_where_hidden_states_come_from_changes_no_completion(tmp_path: Path, model: Path, judge: str):
    """The head stays the fresh one, as nothing is published: token for token a synchronous run is the same."""
    answers: list[dict[object, list[int]]] = []
    for source in ("trainer", "rollout"):
        root, given = tmp_path / source, f"drafter.training.source={source}"
        never = "drafter.training.publish_every=1000"
        quickstart_runs.run(root, model, "drafter=eagle3", *QUICK, judge, "max_staleness=0", "steps=3", never, given)
        answers.append({t.slot: t.tokens.tolist() for t in read_run(root / "run" / "trajectories")})
        assert quickstart_runs.summary(root)["drafter"]["windows"] > 0
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_drafter_on_ray_goes_on_after_a_kill(tmp_path: Path, model: Path, judge: str):
    process = quickstart_runs.start(tmp_path, model, "drafter=eagle3", *QUICK, judge, "cluster=local", "steps=12")
    quickstart_runs.kill_after_step(process, tmp_path, 4)
    state = tmp_path / "run" / "drafter" / STATE
    before = int(load_file(state)["updates"]) if state.is_file() else 0
    quickstart_runs.resume(tmp_path / "run")
    assert quickstart_runs.summary(tmp_path)["ledger"]["consumed"] == 12 * 16
    assert int(load_file(state)["updates"]) > before
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(12))


def test_ngram_drafts_change_no_answer(tmp_path: Path, model: Path):
    """Under the same seeds the answers of a synchronous run are the same, token for token, with drafts and without."""
    answers: list[dict[object, list[int]]] = []
    for name, drafter in (("plain", ()), ("ngram", ("drafter=ngram", "drafter.adaptive.on=false"))):
        root = tmp_path / name
        quickstart_runs.run(root, model, "max_staleness=0", "steps=2", *drafter)
        answers.append({t.slot: t.tokens.tolist() for t in read_run(root / "run" / "trajectories")})
    assert answers[0] == answers[1]
    assert quickstart_runs.summary(tmp_path / "ngram")["acceptance_length_mean"] > 1


@pytest.mark.slow
def test_what_the_bandit_measured_survives_a_kill(tmp_path: Path, model: Path):
    process = quickstart_runs.start(tmp_path, model, "drafter=ngram", "steps=8")
    quickstart_runs.kill_after_step(process, tmp_path, 4)
    saved = msgspec.json.decode((tmp_path / "run" / "speculation.json").read_bytes(), type=dict[str, list[Range]])
    before = sum(arm.steps for here in saved["rollout-0"] for arm in here.arms)
    assert before > 0
    quickstart_runs.resume(tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert sum(arm["steps"] for arm in rows[-1]["speculation"]) > before
