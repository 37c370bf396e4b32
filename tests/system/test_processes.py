"""The state of processes as seen from outside, and whether a pid still belongs to the process that was noted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from asyncrl.system import processes

NOBODYS_PID = 2**22 + 1
"""Above the largest that Linux gives."""


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def wait_for(pid: int, state: str) -> None:
    deadline = time.monotonic() + 30
    while processes.state(pid) != state:
        assert time.monotonic() < deadline, processes.state(pid)
        time.sleep(0.01)


def test_a_process_sleeps_is_stopped_and_ends(child: "subprocess.Popen[bytes]") -> None:
    wait_for(child.pid, "sleeps")
    child.send_signal(signal.SIGSTOP)
    wait_for(child.pid, "stopped")
    child.kill()
    wait_for(child.pid, "ended")  # not yet waited for: a zombie
    assert not processes.is_still(child.pid, time.time())
    child.wait()
    assert processes.state(child.pid) == "ended"
    assert processes.state(os.getpid()) == "computes"


def test_a_later_process_with_the_same_pid_is_another_one(child: "subprocess.Popen[bytes]") -> None:
    assert processes.is_still(child.pid, time.time())
    assert not processes.is_still(child.pid, time.time() - 3600)
    assert not processes.is_still(NOBODYS_PID, time.time())
