"""Directories that live as long as a process: what a killed process left behind, the next one removes.

The owner holds a lock on a file inside; the kernel releases it even after kill -9. A lock that can be taken means that
the owner is dead. Not by filelock: it opens files by name and creates missing ones, so that looking at a directory that
is to be kept would mark it for removal, and it cannot lock a file before that has its name.
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


def has_owner(directory: Path) -> bool:
    """Whether the process that made the directory is alive."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:  # another user's, whose processes are not ours to judge
        return True
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_left(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # it is gone already, or another user's
        return
    try:
        if _try_lock(descriptor):
            shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
