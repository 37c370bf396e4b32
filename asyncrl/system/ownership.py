"""Which processes belong to a run: each inherits a mark in its environment that names the process which owns the run.

So whatever a run has started can be found and ended when the owner is gone, by whatever death: Ray's agents outlive a
killed driver by minutes. A process that writes its title over its environment (those agents do) belongs to whom its
parent belongs to. A mark counts only in the PID namespace that it was made in.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

from asyncrl.system import processes

MARK = "ASYNCRL_OWNER"
"""The environment variable."""
END_S = 5.0
"""For processes to be gone after SIGKILL."""


def mark() -> str:
    """Of this process as an owner."""
    return f"{processes.place()}|{os.getpid()}|{psutil.Process().create_time()}"


def owned(owner: str) -> Iterator[psutil.Process]:
    """What was started with this mark: neither the owner nor what it has forked."""
    return (process for process, found in _marked() if found == owner)


def left_behind() -> Iterator[psutil.Process]:
    """What belongs to owners that are gone."""
    alive: dict[str, bool] = {}
    for process, owner in _marked():
        if owner not in alive:
            alive[owner] = _is_alive(owner)
        if not alive[owner]:
            yield process


def end(found: Iterable[psutil.Process]) -> int:
    """Kill them; returns how many there were."""
    killed: list[psutil.Process] = []
    for process in list(found):  # all first: a child is known by its parent
        with suppress(psutil.Error):  # it has ended meanwhile
            process.kill()
            killed.append(process)
    psutil.wait_procs(killed, timeout=END_S)
    return len(killed)


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    running = {process.pid: process for process in psutil.process_iter()}
    owners: dict[int, str] = {}

    def owner_of(process: psutil.Process) -> str:
        if process.pid not in owners:
            owners[process.pid] = ""  # a parent's number may be another process's by now: no way round in circles
            with suppress(psutil.Error, OSError):  # others' are not ours to read
                parent = running.get(process.ppid())
                owners[process.pid] = process.environ().get(MARK) or (owner_of(parent) if parent else "")
        return owners[process.pid]

    for process in running.values():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and (owner := owner_of(process)) and process.status() != psutil.STATUS_ZOMBIE:
                yield process, owner


def _is_alive(owner: str) -> bool:
    place, pid, started = owner.rsplit("|", 2)
    if place != processes.place():  # in another container, perhaps
        return True
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int(pid))
        return process.create_time() == float(started) and process.status() != psutil.STATUS_ZOMBIE
    return False
