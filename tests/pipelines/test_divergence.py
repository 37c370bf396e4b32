"""A run that its sentinel stopped, resumed in every way that the message advises."""

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.buffer.log import lock_directory
from asyncrl.system.run_directory import read_events
from asyncrl.training.checkpoint import numbered
from pipelines.compose import from_yaml
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl

STEPS = 6


def _judge(directory: Path, body: str) -> str:
    path = directory / "judge.py"
    path.write_text(f"from pathlib import Path\n\ndef reward(prompt, completion, answer):\n    {body}\n")
    return f"reward.function={path}:reward"


def _run(root: Path, model: Path, *words: str) -> Done:
    return asyncrl(*quickstart_runs.command(root, model, f"steps={STEPS}", *words)[1:])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, str]:
    """The first update is far too large, and the samples of the second step are of the version before it."""
    root = tmp_path_factory.mktemp("stopped")
    judge = _judge(root, "return float(len(set(completion)))")
    done = _run(root, model, judge, "max_staleness=1", "trainer.lr=0.03", "checkpoint.every=100")
    assert done.code == 7, done.out + done.err
    return root / "run", done.err


def _copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def _ends_well(directory: Path, *words: str) -> list[bool]:
    """Resume, and check what is left; which steps were skipped."""
    done = asyncrl("resume", directory, *words)
    assert done.code == 0, done.out + done.err
    assert quickstart_runs.summary(directory.parent)["status"] == "ok"
    assert quickstart_runs.summary(directory.parent)["samples_trained"] == STEPS * 16
    sound = asyncrl("check", directory)
    assert sound.code == 0, sound.out
    again = asyncrl("replay", directory)
    assert again.code == 0, again.out + again.err
    assert again.out.splitlines()[-1].startswith(f"identical: {STEPS} steps again")
    return pq.read_table(directory / "metrics.parquet").column("skipped").to_pylist()


def test_the_stop_says_how_to_continue_and_keeps_the_weights_before_it(stopped: tuple[Path, str]) -> None:
    directory, said = stopped
    assert "step 2: mismatch_kl=" in said
    assert f"`asyncrl resume {directory} 'sentinel.skip_steps=[2]' trainer.lr=...`" in said
    assert f"`asyncrl resume {directory} sentinel.max_kl=...`" in said
    assert [step for step, _ in numbered(directory / "checkpoints")] == [1]
    assert asyncrl("check", directory).code == 0


def test_without_a_change_it_stops_again(stopped: tuple[Path, str], tmp_path: Path) -> None:
    directory = _copy(stopped[0], tmp_path)
    done = asyncrl("resume", directory)
    assert done.code == 7
    assert "step 2: mismatch_kl=" in done.err
    assert asyncrl("check", directory).code == 0
    assert asyncrl("replay", directory).out.splitlines()[-1].startswith("identical: 1 steps again")


def test_skipping_the_step_at_a_lower_rate(stopped: tuple[Path, str], tmp_path: Path) -> None:
    directory = _copy(stopped[0], tmp_path)
    skipped = _ends_well(directory, "sentinel.skip_steps=[2]", "trainer.lr=1e-6")
    assert skipped == [False, True, False, False, False, False]
    assert from_yaml(directory / "config.yaml").trainer.lr == 1e-6
    assert from_yaml(directory / "earlier_settings" / "until-1.yaml").trainer.lr == 0.03
    (change,) = [event for event in read_events(directory / "events.jsonl") if event["kind"] == "settings_changed"]
    assert (change["step"], change["overrides"]) == (1, ["sentinel.skip_steps=[2]", "trainer.lr=1e-6"])
    other = asyncrl("replay", directory, "trainer.lr=1e-6")
    assert (other.code, "different: " in other.out) == (0, True), "an override holds for all steps"


def test_skipping_the_step_with_a_tighter_bound_of_staleness(stopped: tuple[Path, str], tmp_path: Path) -> None:
    directory = _copy(stopped[0], tmp_path)
    skipped = _ends_well(directory, "sentinel.skip_steps=[2]", "max_staleness=0")
    assert skipped == [False, True, False, False, False, False]
    ages = pq.read_table(directory / "metrics.parquet").column("staleness_max").to_pylist()
    assert ages[1] == 1, "the recorded step is what it was"
    assert ages[2:] == [0] * (STEPS - 2)


def test_a_wider_bound(stopped: tuple[Path, str], tmp_path: Path) -> None:
    assert not any(_ends_well(_copy(stopped[0], tmp_path), "sentinel.max_kl=0"))


def test_going_back_at_a_lower_rate(stopped: tuple[Path, str], tmp_path: Path) -> None:
    """Recorded steps after the checkpoint are taken again with the new settings. Their samples are of the weights that
    were given up, so that the sentinel would stop the run again."""
    directory = _copy(stopped[0], tmp_path)
    shutil.rmtree(directory / "checkpoints")
    assert not any(_ends_well(directory, "trainer.lr=1e-6", "sentinel.max_kl=0"))
    assert not (directory / "earlier_settings").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("max_staleness=2", "max_staleness=2: samples of this run were admitted under max_staleness=1"),
        ("rollout.top_p=0.5", "rollout.top_p=0.5 cannot be changed here; max_staleness, "),
        ("trainer.dtype=bf16", "trainer.dtype=bf16 cannot be changed here"),
        ("sentinel.skip_steps=[0]", "sentinel.skip_steps"),
        ("sentinel.max_kll=1", "did you mean sentinel.max_kl?"),
    ],
)
def test_other_changes_are_refused_and_leave_the_run_as_it_is(stopped: tuple[Path, str], words: str, said: str) -> None:
    before = (stopped[0] / "config.yaml").read_bytes()
    done = asyncrl("resume", stopped[0], words)
    assert done.code == 2
    assert said in done.err
    assert (stopped[0] / "config.yaml").read_bytes() == before


def test_the_settings_of_a_live_run_stay(stopped: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.log.LOCK_S", 0.1)
    before = (stopped[0] / "config.yaml").read_bytes()
    lock = lock_directory(stopped[0] / "trajectories")
    try:
        done = asyncrl("resume", stopped[0], "trainer.lr=1e-6")
    finally:
        os.close(lock)
    assert (done.code, "is in use by another process" in done.err) == (2, True)
    assert (stopped[0] / "config.yaml").read_bytes() == before


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_samples_that_cannot_be_learned_from_are_left_behind(tmp_path: Path, model: Path) -> None:
    """Rewards whose mean is not finite skip every step, until the judge is mended."""
    flag = tmp_path / "broken"
    flag.touch()
    judge = _judge(tmp_path, f"return len(set(completion)) * (1e307 if Path({str(flag)!r}).exists() else 1.0)")
    done = _run(tmp_path, model, judge, "max_staleness=0", "sentinel.max_skipped=2", "checkpoint.every=100")
    assert done.code == 7, done.out + done.err
    assert "2 steps in a row were skipped, the last because" in done.err
    assert f"`asyncrl resume {tmp_path / 'run'}` continues after them" in done.err
    flag.unlink()
    assert _ends_well(tmp_path / "run") == [True, True, False, False, False, False]
