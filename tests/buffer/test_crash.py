"""Real processes, real SIGKILL. Run `python -m tests.support.crash_loop` for more of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def crash(directory: Path, *, kills: int, seed: int, prune: bool = False) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "tests.support.crash_loop",
        str(directory),
        "--kills",
        str(kills),
        "--seed",
        str(seed),
        *(["--prune"] if prune else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["lost"] == result["duplicated"] == result["bad_files"] == result["trained_twice"] == 0
    assert (result["kills"], result["acknowledged"] > kills) == (kills, True)
    return result


def test_thirty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    assert crash(tmp_path / "run", kills=30, seed=7)["steps"] > 3


@pytest.mark.slow
def test_thirty_kills_of_a_run_that_prunes_lose_nothing_that_was_not_trained_on(tmp_path: Path) -> None:
    found = crash(tmp_path / "run", kills=30, seed=8, prune=True)
    assert found["steps"] > 3
    assert found["pruned"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_hundred_kills_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    assert crash(tmp_path / "run", kills=200, seed=seed, prune=seed == 3)["steps"] > 50
