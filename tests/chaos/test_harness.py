"""`asyncrl chaos` and `asyncrl check` as a user runs them."""

import os
import subprocess
from pathlib import Path

import pytest

from asyncrl.chaos import plan
from tests.support import quickstart_runs
from tests.support.command import asyncrl

ALL = ",".join(plan.KINDS)


def chaos(root: Path, model: Path, *words: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    settings = [
        *quickstart_runs.command(root, model, "name=trial")[2:],
        "checkpoint.every=2",
        "flow.stall_timeout_s=60",
    ]
    return subprocess.run(
        [quickstart_runs.COMMAND, "chaos", *settings, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_survives_and_a_verdict_that_fails_names_the_command_that_repeats_it(tmp_path: Path, model: Path) -> None:
    """The score that is asked for is out of reach; everything before it holds."""
    words = ["steps=3", "--seed", "3", "--faults", "flip,nan_reward", "--rounds", "1"]
    done = chaos(tmp_path, model, *words, "--at-least", "2", timeout=280)
    first, second = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert first.startswith("chaos seed 3: FAILED: the held-out score is 0.0, wanted were 2"), first
    assert second.startswith("repeat: asyncrl chaos experiment=quickstart")
    assert second.endswith(" --seed 3 --faults flip,nan_reward --rounds 1")
    run = tmp_path / "trial"
    assert "is damaged at offset" in (tmp_path / "trial.log").read_text()
    sound = asyncrl("check", run)
    assert (sound.code, sound.err) == (0, "")
    assert "0 in flight + 0 buffered + 48 consumed" in sound.out
    [segment] = (run / "trajectories").glob("ledger-*.seg")
    segment.write_bytes(segment.read_bytes()[:-1])
    damaged = asyncrl("check", run)
    assert damaged.code == 1
    assert f"VIOLATION   {segment} is damaged at offset" in damaged.out
    again = chaos(tmp_path, model, timeout=60)
    assert again.returncode == 2
    assert "must not exist yet" in again.stderr


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kinds", "rounds", "steps"), [("kill", 30, 120), (ALL, 24, 120)])
def test_every_role_on_ray(tmp_path: Path, model: Path, kinds: str, rounds: int, steps: int) -> None:
    """With two engines there are six roles: thirty kills are five of each."""
    words = ["cluster=local", "rollout.replicas=2", f"steps={steps}", "--seed", "5", "--faults", kinds]
    done = chaos(tmp_path, model, *words, "--rounds", str(rounds), timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{rounds} faults" in done.stdout
