"""Which process plays which role, written down for those who look from outside."""

import os
from pathlib import Path

import msgspec

from actors.fleet import Fleet
from actors.spawn import handle_of
from asyncrl.rundir import replace

NAME = "actors.json"


async def write(fleet: Fleet, path: Path) -> None:
    """`path` gets the process ids by role. An actor whose process is made anew later has another one."""
    actors = {"buffer": fleet.buffer, "reward": fleet.reward, "trainer": fleet.trainer, **fleet.publisher.living}
    pids = {name: await _pid(actor) for name, actor in actors.items()}
    replace(path, msgspec.json.encode({"driver": os.getpid(), **pids}))


async def _pid(actor: object) -> int:
    handle = handle_of(actor)
    return os.getpid() if handle is None else await handle.__ray_call__.remote(_own_pid)


def _own_pid(_: object) -> int:
    return os.getpid()
