"""A worker ends when its parent goes away, and never anybody else: not who started it, nor the script around that."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config import Reward
from asyncrl.errors import ConfigError
from asyncrl.system import processes
from asyncrl.user_code import pool
from asyncrl.user_code.pool import check_function

NAME = "asyncrl.no_such:reward"
HANGS_UP = """
import subprocess, sys
import msgspec
from asyncrl.user_code.protocol import RewardInput
from asyncrl.user_code.worker import HEADER
words = [sys.executable, "-m", "asyncrl.user_code.worker", "reward", sys.argv[1]]
worker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
payload = msgspec.msgpack.encode(RewardInput("", "", ""))
worker.stdin.write(HEADER.pack(len(payload)) + payload)
worker.stdin.close()
print(worker.wait())
"""
LATE = """
import select, sys, time
from asyncrl.user_code import worker
def late(poll=select.poll):
    time.sleep(0.2)
    return poll()
select.poll = late
worker.main("reward", sys.argv[1])
time.sleep(1)
"""


def started(program: str, name: str) -> "subprocess.CompletedProcess[bytes]":
    """In a session of its own, so that only it is lost if all in its group are killed."""
    return subprocess.run(
        [sys.executable, "-c", program, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


def test_a_worker_in_the_group_of_its_parent_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef reward(prompt, completion, answer): time.sleep(1000)\n")
    parent = started(HANGS_UP, f"{tmp_path}/slow.py:reward")
    assert (parent.returncode, parent.stdout) == (0, b"-9\n")


@pytest.mark.parametrize("name", [NAME, "asyncrl.tasks.chains:reward"])
def test_a_worker_that_is_done_is_not_taken_for_one_whose_parent_went_away(name: str) -> None:
    assert started(LATE, name).returncode == 0


def test_a_function_is_checked_in_a_session_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(
        "import os, pathlib\n"
        "pathlib.Path(__file__).with_name('place').write_text(f'{os.getpid()} {os.getpgrp()} {os.getsid(0)}')\n"
        "def reward(prompt, completion, answer): return 1\n"
    )
    check_function(Reward(function=f"{tmp_path}/where.py:reward"))
    pid, group, session = (tmp_path / "place").read_text().split()
    assert pid == group == session


def test_a_check_that_takes_too_long_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['/usr/bin/sleep', '1000'])\n"
        "pathlib.Path(__file__).with_name('child').write_text(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(pool, "START_S", 8.0)
    with pytest.raises(ConfigError, match="importing it took more than 8 s"):
        check_function(Reward(function=f"{tmp_path}/hangs.py:reward"))
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 30
    while processes.state(child) != "ended":
        assert time.monotonic() < end
        time.sleep(0.05)
