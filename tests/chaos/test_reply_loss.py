"""Replies between processes get lost on a real Ray, by its own fault injector; what was appended is there once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.reply_loss import POLLS

ROOT = Path(__file__).parents[2]
PUSH = "CoreWorkerService.grpc_client.PushTask"


def lose_replies(directory: Path, *, appends: int, percent: int, timeout: float) -> dict[str, int]:
    """In a process of its own: Ray reads what to lose from the environment, once."""
    losses = {"num_failures": -1, "req_failure_prob": 0, "resp_failure_prob": percent, "in_flight_failure_prob": 0}
    environment = os.environ | {"RAY_testing_rpc_failure": json.dumps({PUSH: losses}), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.reply_loss", str(directory), str(appends)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / "result.json").read_text())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("appends", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_lost_replies_neither_lose_nor_double_an_append(tmp_path: Path, appends: int) -> None:
    found = lose_replies(tmp_path / "run", appends=appends, percent=25, timeout=280)
    assert found["visible"] == found["acknowledged"] == appends
    assert found["answered_duplicate"] > appends // 20, "hardly a reply was lost, so nothing was tried"
    assert found["frames"] == appends
    assert found["polls"] == POLLS, "none has ended the run"
