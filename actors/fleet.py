"""The fleet: the actors of a run, how engines join and leave, and the file of process ids by role."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from actors.buffer import BufferActor
from actors.gateway.actor import GatewayActor
from actors.publisher import DrafterLink, Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.runtime.health_probe import probe
from actors.teacher import TeacherActor
from actors.trainer.actor import TrainerActor
from actors.trainer.group import ranks_of
from asyncrl.errors import ActorError
from asyncrl.fleet.state import FleetState
from asyncrl.system.run_directory import replace
from asyncrl.types import LedgerCounts

T = TypeVar("T")
CLOSE_SECONDS = 30.0
"""For one actor to end in good order; vLLM needs several seconds."""


@dataclass(frozen=True)
class Fleet:
    """The actors of one run; a pipeline talks to them and to nothing else."""

    buffer: BufferActor
    reward: RewardActor
    state: FleetState[RolloutActor]
    """Who the engines are; the publisher asks the same object."""
    trainer: TrainerActor
    publisher: Publisher
    factory: "EngineFactory"
    drafter: DrafterLink | None = None
    gateway: GatewayActor | None = None
    """Of a run of an agent."""
    teachers: tuple[TeacherActor, ...] = ()
    """Of a distillation."""

    @property
    def unique(self) -> dict[str, object]:
        """By role, those that a run cannot do without."""
        gateway = {"gateway": self.gateway} if self.gateway is not None else {}
        return {"buffer": self.buffer, "reward": self.reward, **gateway, **named(self.teachers)}

    @property
    def callers(self) -> list[RewardActor | GatewayActor | TeacherActor]:
        """Those that may fail on single samples: they call the user's functions, or the user's models."""
        gateway = [] if self.gateway is None else [self.gateway]
        return [self.reward, *gateway, *self.teachers]

    async def close(self) -> tuple[LedgerCounts | None, dict[str, int]]:
        """Close every actor but engines that are known to be dead or hung; the cluster ends those that do not. Returns
        the buffer's last sums.

        Engines are first: to those a reward or teacher that is closed would be one that fails, and their samples lost.
        The buffer is last: the others may still have something for it.
        """
        drafters = [self.drafter] if self.drafter is not None else []
        gateways = [self.gateway] if self.gateway is not None else []
        engines = [self.state.handles[name] for name in self.state.participants]
        for together in (engines, [self.reward, *self.teachers, *gateways, *drafters, self.trainer]):
            await asyncio.gather(*(close_actor(actor.close()) for actor in together))
        return await close_actor(self.buffer.close()) or (None, {})


def named(teachers: Sequence[TeacherActor]) -> dict[str, TeacherActor]:
    return {f"teacher-{number}": teacher for number, teacher in enumerate(teachers)}


@dataclass(frozen=True)
class EngineFactory:
    """How engines join and leave during a run."""

    place_engine: Callable[[str], Awaitable[RolloutActor]]
    """Starts another one, under a new name; waits until the cluster has resources for it."""
    end: Callable[[RolloutActor], None]
    """Ends its process."""
    expect: Callable[[int], None]
    """Requests so many engines from the cluster in all, so that it can start machines; 0: no request any more."""


async def close_actor(closing: Awaitable[T]) -> T | None:
    """Whatever an actor says when it closes; None if it died, or does not end in time."""
    with suppress(ActorError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            return await closing
    return None


ANSWER_S = 10.0


async def write_pid_file(fleet: Fleet, path: Path) -> None:
    """`path` gets the process ids by role, of the actors that answer. A restarted process has another one."""
    actors = {**fleet.unique, **ranks_of(fleet.trainer), **fleet.state.handles}
    answers = await asyncio.to_thread(probe, actors, _own_pid, ANSWER_S)
    pids = {name: pid for name, pid in answers.items() if isinstance(pid, int)}
    replace(path, msgspec.json.encode({"driver": os.getpid(), **pids}))


def _own_pid(_: object) -> int:
    return os.getpid()
