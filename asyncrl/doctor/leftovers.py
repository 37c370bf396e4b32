"""What ended runs have left on a machine: a Ray whose driver is dead, and directories with logs. Linux only."""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

from asyncrl.doctor.facts import Leftovers
from asyncrl.owned import LOCK

RAYS = re.compile(r"/(gcs_server|raylet) ")


def find(home: Path) -> Leftovers:
    """`home` is where the directories of our own Rays are made."""
    ended = [path for path in home.glob("asyncrl-*") if path.is_dir() and not _is_held(path / LOCK)]
    kept = [path for path in ended if (path / "ray").is_dir() and path.stat().st_uid == os.geteuid()]
    return Leftovers(
        processes=tuple(pid for pid, words in _rays() if any(f"{path}/" in words for path in ended)),
        directories=tuple(sorted(map(str, kept))),
        bytes=sum(map(_size, kept)),
    )


def _is_held(lock: Path) -> bool:
    """Whether the process that owns a directory is alive."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:  # somebody else's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _rays() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            words = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if RAYS.search(words):
                found.append((int(process.name), words))
    return found


def _size(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
