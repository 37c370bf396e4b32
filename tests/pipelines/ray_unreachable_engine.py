"""An engine on a real Ray whose connection breaks while its process lives."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import psutil

from actors.fleet import Fleet
from actors.runtime.resources import Resources
from actors.runtime.spawn import Spawner, cluster
from asyncrl.config import Recovery, Run
from asyncrl.errors import ActorError, EngineError
from asyncrl.fleet.state import FleetState
from pipelines.fleet.engine_pool import EnginePool


class Engine:
    """Cannot be started twice, as none can."""

    def __init__(self) -> None:
        self._started = False

    async def started(self) -> bool:
        return self._started

    async def start(self) -> None:
        if self._started:
            raise EngineError("was started before; make a new one")
        self._started = True

    async def pid(self) -> int:
        return os.getpid()


async def _break_the_connection(spawner: Spawner) -> None:
    engine = await spawner.spawn("a", Resources(cpus=0.0, restarts=3), Engine)
    await engine.start()
    before = await engine.pid()
    state: FleetState[Any] = FleetState({"a": engine}, 3)
    fleet = cast(Fleet, SimpleNamespace(state=state, factory=SimpleNamespace(end=spawner.end)))
    back = asyncio.get_running_loop().create_future()

    async def refit() -> None:
        back.set_result(None)

    pool = EnginePool(Run(recovery=Recovery(max_restarts=3)), fleet, MagicMock(), MagicMock(), refit)
    error = ActorError("actor a died during generate: the connection is broken")
    error.actor, error.returns = "a", True
    pool.lost("a", error)
    async with asyncio.timeout(60):
        await asyncio.wait([back, asyncio.ensure_future(pool.watch())], return_when=asyncio.FIRST_COMPLETED)
    assert state.in_state("stale") == ("a",)
    assert await engine.started()
    assert await engine.pid() != before
    assert not psutil.pid_exists(before)


def test_it_is_started_anew_as_a_dead_one_is() -> None:
    with cluster("local", cpus=1) as spawner:
        asyncio.run(_break_the_connection(spawner))
