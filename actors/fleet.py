"""Which process plays which role, written down for those who look from outside."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from actors.buffer import BufferActor
from actors.publisher import DrafterLink, Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.runtime.health_probe import ask
from actors.trainer.actor import TrainerActor
from actors.trainer.group import ranks_of
from asyncrl.errors import ActorError
from asyncrl.system.run_directory import replace

# Who takes part in a run.

CLOSE_SECONDS = 30.0
"""For one actor to end in good order; vLLM needs several seconds."""


@dataclass(frozen=True)
class Fleet:
    """The actors of one run; a pipeline talks to them and to nothing else."""

    buffer: BufferActor
    reward: RewardActor
    engines: dict[str, RolloutActor]
    """The same object that the publisher has: whoever joins or leaves here does so there."""
    trainer: TrainerActor
    publisher: Publisher
    factory: "EngineFactory"
    drafter: DrafterLink | None = None

    async def close(self) -> None:
        """Ask everybody to end but engines that are known to be dead or hung; the cluster ends whoever does not.

        The buffer is last: the others may still have something for it.
        """
        drafters = [self.drafter] if self.drafter is not None else []
        others = [*self.publisher.living.values(), self.reward, *drafters, self.trainer]
        await asyncio.gather(*(_close(actor) for actor in others))
        await _close(self.buffer)


@dataclass(frozen=True)
class EngineFactory:
    """How engines come and go while a run goes on."""

    place_engine: Callable[[str], Awaitable[RolloutActor]]
    """Places another one, under a new name; waits until the cluster has room for it."""
    end: Callable[[RolloutActor], None]
    """Ends its process."""
    expect: Callable[[int], None]
    """Tells the cluster how many there should be in all, so that it can bring machines; 0: no matter any more."""


async def _close(actor: RolloutActor | RewardActor | DrafterLink | TrainerActor | BufferActor) -> None:
    with suppress(ActorError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await actor.close()


ANSWER_S = 10.0


async def write_pid_file(fleet: Fleet, path: Path) -> None:
    """`path` gets the process ids by role, of those who answer. A process that is made anew later has another one."""
    actors = {"buffer": fleet.buffer, "reward": fleet.reward, **ranks_of(fleet.trainer), **fleet.publisher.living}
    answers = await asyncio.to_thread(ask, actors, _own_pid, ANSWER_S)
    pids = {name: pid for name, pid in answers.items() if isinstance(pid, int)}
    replace(path, msgspec.json.encode({"driver": os.getpid(), **pids}))


def _own_pid(_: object) -> int:
    return os.getpid()
