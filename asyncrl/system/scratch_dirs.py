"""Directories for as long as a process lives: what one left behind that was killed, the next one removes.

The owner holds a lock on a file inside. A lock that can be had means that its owner is dead.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".owner"


def scratch_directory(prefix: str, where: Path) -> Path:
    """A fresh directory, mode 0700, whose name begins with `asyncrl-`."""
    for lock in where.glob(f"asyncrl-*/{LOCK}"):
        _remove_if_left(lock)
    directory = Path(tempfile.mkdtemp(prefix=f"asyncrl-{prefix}", dir=where))
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)  # closed when the process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (directory / "lock").rename(directory / LOCK)  # not before it is locked: others look for it
    return directory


def keep(directory: Path) -> None:
    """Nobody removes it any more."""
    (directory / LOCK).unlink(missing_ok=True)


def _remove_if_left(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # it is gone already, or somebody else's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
