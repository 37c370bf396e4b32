"""Which process plays which role, written down for those who look from outside."""

import asyncio
import os
from pathlib import Path

import msgspec

from actors.asking import ask
from actors.fleet import Fleet
from actors.trainer_gang import ranks_of
from asyncrl.rundir import replace

ANSWER_S = 10.0


async def write(fleet: Fleet, path: Path) -> None:
    """`path` gets the process ids by role, of those who answer. A process that is made anew later has another one."""
    actors = {"buffer": fleet.buffer, "reward": fleet.reward, **ranks_of(fleet.trainer), **fleet.publisher.living}
    answers = await asyncio.to_thread(ask, actors, _own_pid, ANSWER_S)
    pids = {name: pid for name, pid in answers.items() if isinstance(pid, int)}
    replace(path, msgspec.json.encode({"driver": os.getpid(), **pids}))


def _own_pid(_: object) -> int:
    return os.getpid()
