"""A recorded run, trained again without engines."""

import json
from pathlib import Path

import pyarrow.parquet as pq
from safetensors.torch import load_file

from asyncrl.models.checkpoint import WEIGHTS, load_model
from pipelines.compose import from_yaml
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl


def replay(run: Path, *words: str) -> Done:
    return asyncrl("replay", run, *words)


def graded(directory: Path) -> str:
    """The override for a judge of its own: an untrained model is never right, and would not learn from that."""
    judge = directory / "judge.py"
    judge.write_text("def reward(prompt, completion, answer):\n    return float(len(set(completion)))\n")
    return f"reward.function={judge}:reward"


def test_a_run_that_was_killed_and_resumed_replays_to_the_same_weights(tmp_path: Path, model: Path) -> None:
    process = quickstart_runs.start(tmp_path, model, "steps=5", graded(tmp_path))
    quickstart_runs.kill_after_step(process, tmp_path, 2)
    quickstart_runs.resume(tmp_path / "run")
    done = replay(tmp_path / "run", "--out", str(tmp_path / "again"))
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith("identical: 5 steps again")
    recorded = load_file(tmp_path / "run" / "checkpoints" / "step-5" / WEIGHTS)
    again = load_file(tmp_path / "again" / "model" / WEIGHTS)
    start = load_file(model / WEIGHTS)
    assert not any(start[name].equal(tensor) for name, tensor in recorded.items()), "the run has learned something"
    assert all(again[name].equal(tensor) for name, tensor in recorded.items())
    load_model(tmp_path / "again" / "model")

    other = replay(tmp_path / "run", "correction=none", "trainer.lr=1e-3")
    assert other.code == 0, other.err
    assert other.out.splitlines()[-1].startswith("different: 5 steps again")

    for words, said in {
        "engine=fake": "engine=fake cannot be changed here; algorithm, correction, trainer, distill can",
        "trainer.lrr=1": "did you mean trainer.lr?",
        "trainer.lr=-1": "trainer.lr=-1",
    }.items():
        refused = replay(tmp_path / "run", words)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err


def test_the_directory_of_a_replay_says_what_that_of_its_run_says(tmp_path: Path, model: Path) -> None:
    """What both have is the same to the last bit, held-out answers included."""
    run, again = tmp_path / "run", tmp_path / "again"
    quickstart_runs.run(tmp_path, model, "steps=3", "evaluation.right_from=9", graded(tmp_path))
    again.mkdir()  # an empty directory is as good as none
    done = replay(run, "--evaluate", "--out", str(again))
    assert done.code == 0, done.err
    assert from_yaml(again / "config.yaml") == from_yaml(run / "config.yaml")
    recorded, replayed = (pq.read_table(path / "metrics.parquet") for path in (run, again))
    assert {"step", "reward", "loss", "grad_norm", "skipped", "ess", "staleness_max"} <= set(replayed.column_names)
    assert set(replayed.column_names) <= set(recorded.column_names)
    assert replayed.to_pydict() == recorded.select(replayed.column_names).to_pydict()
    summary, of_run = (json.loads((path / "summary.json").read_text()) for path in (again, run))
    assert (summary["status"], summary["kind"], summary["identical"]) == ("ok", "replay", True)
    assert summary["replay_of"] == str(run)
    assert summary["digest"] == summary["recorded_digest"]
    for name in ("steps", "samples_trained", "reward_first", "reward_last", "staleness_mean", "staleness_max", "ess"):
        assert summary[name] == of_run[name]
    for name in ("eval_first", "eval_first_greedy", "eval_last", "eval_last_greedy", "evaluations"):
        assert summary[name] == of_run[name], "the same weights answer the same"
    assert 0 < summary["eval_last"] < 1, "which could not be said of a judge that is always or never content"

    refused = replay(run, "--out", str(again))
    assert (refused.code, refused.out) == (2, "")
    assert f"--out {again} exists already and is not empty" in refused.err


def test_what_is_no_run_or_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "is not a run directory" in replay(tmp_path).err
