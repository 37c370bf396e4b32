"""A recorded run, trained again without engines."""

import subprocess
from pathlib import Path

from safetensors.torch import load_file

from asyncrl.models.checkpoint import WEIGHTS, load_model
from tests.pipelines import helpers


def replay(run: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([helpers.COMMAND, "replay", str(run), *words], capture_output=True, text=True, timeout=100)


def test_a_run_that_was_killed_and_resumed_replays_to_the_same_weights(tmp_path: Path, model: Path) -> None:
    judge = tmp_path / "judge.py"  # an untrained model is never right, and would not learn from that
    judge.write_text("def reward(prompt, completion, answer):\n    return float(len(set(completion)))\n")
    process = helpers.start(tmp_path, model, "steps=5", f"reward.function={judge}:reward")
    helpers.kill_after_step(process, tmp_path, 2)
    helpers.resume(tmp_path / "run")
    done = replay(tmp_path / "run", "--out", str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("identical: 5 steps again")
    recorded = load_file(tmp_path / "run" / "checkpoints" / "step-5" / WEIGHTS)
    again = load_file(tmp_path / "again" / WEIGHTS)
    start = load_file(model / WEIGHTS)
    assert not any(start[name].equal(tensor) for name, tensor in recorded.items()), "the run has learned something"
    assert all(again[name].equal(tensor) for name, tensor in recorded.items())
    load_model(tmp_path / "again")

    other = replay(tmp_path / "run", "correction=none", "trainer.lr=1e-3")
    assert other.returncode == 0, other.stderr
    assert other.stdout.splitlines()[-1].startswith("different: 5 steps again")

    for words, said in {
        "engine=fake": "engine=fake cannot be changed here; algorithm, correction, trainer can",
        "trainer.lrr=1": "did you mean trainer.lr?",
        "trainer.lr=-1": "trainer.lr=-1",
    }.items():
        refused = replay(tmp_path / "run", words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr


def test_what_is_no_run_or_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "is not a run directory" in replay(tmp_path).stderr
