"""A trainer of several ranks, each in a process of its own: to a pipeline it is one trainer.

    pipeline -> gang -> every rank: the same call, and the next only when all have answered
                          | rank 0's answer is the gang's
                          v
                        FSDP2 among the ranks (asyncrl.training.distributed.fsdp)

When a rank dies, its call fails with its name, the run starts again from the last checkpoint, and with it all ranks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from actors.buffer import BufferActor
from actors.drafter.actor import DrafterActor
from actors.runtime.background import retrieve_exception
from actors.runtime.resources import Resources, own_address
from actors.runtime.spawn import ActorWrapper, Spawner, unwrap
from actors.trainer.actor import Accumulated, TrainerActor
from asyncrl.config import Run
from asyncrl.errors import ActorError
from asyncrl.training.distributed.ranks import Rendezvous
from asyncrl.training.report import StepReport
from asyncrl.types import Delivery, SendOrder, Trajectory, WeightManifest

T = TypeVar("T")
NOTICE_S = 5.0
"""For the others to end, or for Ray to notice a death, once a rank's call has failed."""


def rank_name(rank: int) -> str:
    return f"trainer-{rank}" if rank else "trainer"


def ranks_of(trainer: object) -> dict[str, object]:
    """The actors behind a trainer, by name."""
    ranks = trainer.ranks if isinstance(trainer, TrainerGroup) else [trainer]
    return {rank_name(number): rank for number, rank in enumerate(ranks)}


async def start(
    spawner: Spawner,
    each: Resources,
    run: Run,
    model_path: Path,
    checkpoints: Path,
    buffer: BufferActor,
    drafter: DrafterActor | None,
    busy: Path | None,
    *,
    timeout_s: float,
) -> TrainerActor:
    """`trainer.ranks` processes that have joined, or one. `timeout_s` is their longest wait for one another."""
    world = run.trainer.ranks
    if world == 1:
        return await spawner.spawn("trainer", each, TrainerActor, run, model_path, checkpoints, buffer, drafter, busy)
    places = await spawner.gang(each, world, timeout_s)
    rendezvous = Rendezvous(own_address(), world, timeout_s)
    async with asyncio.TaskGroup() as tasks:
        starting = [
            tasks.create_task(
                spawner.spawn(
                    rank_name(seat.rank),
                    place,
                    TrainerActor,
                    run,
                    model_path,
                    checkpoints,
                    buffer,
                    None if seat.rank else drafter,
                    None if seat.rank else busy,
                    seat,
                )
            )
            for seat, place in zip(rendezvous.seats, places, strict=True)
        ]
    return cast(TrainerActor, TrainerGroup([task.result() for task in starting], rendezvous))


class TrainerGroup(ActorWrapper):
    def __init__(self, ranks: Sequence[TrainerActor], rendezvous: Rendezvous) -> None:
        super().__init__(unwrap(ranks[0]))
        self.ranks = ranks
        self._meeting = rendezvous
        self._turn = asyncio.Lock()
        self._broken = ""

    async def restore(self, path: Path) -> int:
        return await self._all(lambda rank: rank.restore(path))

    async def accumulate(self, delivery: Delivery) -> Accumulated:
        return await self._all(lambda rank: rank.accumulate(delivery))

    async def step(self) -> StepReport:
        return await self._all(lambda rank: rank.step())

    async def loss(self, trajectories: list[Trajectory]) -> float:
        return await self._all(lambda rank: rank.loss(trajectories))

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        return await self._all(lambda rank: rank.export_weights(order))

    async def save(self) -> Path:
        return await self._all(lambda rank: rank.save())

    async def saved(self) -> int:
        """Ranks save together, and `save` returns when all is written."""
        return await self.ranks[0].saved()

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.ranks), return_exceptions=True)

    async def _all(self, call: Callable[[TrainerActor], Awaitable[T]]) -> T:
        """A caller that is cancelled does not end the call: the ranks are in it, and the next has to wait."""
        task = asyncio.create_task(self._in_turn(call))
        task.add_done_callback(retrieve_exception)
        return await asyncio.shield(task)

    async def _in_turn(self, call: Callable[[TrainerActor], Awaitable[T]]) -> T:
        async with self._turn:
            if self._broken:
                raise ActorError(self._broken)
            calls = [asyncio.ensure_future(call(rank)) for rank in self.ranks]
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(not each.done() or each.exception() is not None for each in calls):
                raise await self._cause(calls)
            return calls[0].result()

    async def _cause(self, calls: Sequence[asyncio.Future[T]]) -> BaseException:
        """The rank that died, also if another one noticed the closed connection first."""
        done, waiting = await asyncio.wait(calls, timeout=NOTICE_S)
        errors = [error for each in done if (error := each.exception()) is not None]
        for each in waiting:
            each.cancel()
        died = [error for error in errors if isinstance(error, ActorError)]
        cause = (died or errors)[0]
        if waiting or died:
            self._broken = f"the trainer's ranks have fallen apart: {cause}"
        return cause
