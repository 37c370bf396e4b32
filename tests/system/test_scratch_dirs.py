"""Directories of a process outlive it only until the next one comes."""

import signal
import subprocess
import sys
from pathlib import Path

from asyncrl.system.scratch_dirs import keep, scratch_directory

OWNER = """
import sys, time
from pathlib import Path
from asyncrl.system.scratch_dirs import scratch_directory
print(scratch_directory("test-", Path(sys.argv[1])), flush=True)
time.sleep(100)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs = Path(owner.stdout.readline().strip())
    (theirs / "weights").write_bytes(b"x" * 1000)
    ours = scratch_directory("test-", tmp_path)
    assert theirs.is_dir()
    assert ours.stat().st_mode & 0o777 == 0o700
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    scratch_directory("test-", tmp_path)
    assert not theirs.exists()
    assert ours.is_dir()


def test_what_is_kept_stays(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs = Path(owner.stdout.readline().strip())
    keep(theirs)
    owner.kill()
    owner.communicate()
    scratch_directory("test-", tmp_path)
    assert theirs.is_dir()
