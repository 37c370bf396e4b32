"""Between two steps of an engine the event loop has several turns, and no caller has all of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.rollout.generation import AT_ONCE
from asyncrl.config import Checkpoint, Flow, Rollout, Run
from asyncrl.config.engine import FakeEngine
from asyncrl.engines.fake import FakeEngine as Fake
from asyncrl.types import Probe, Prompt, Request
from tests.actors.test_publisher import model  # pyright: ignore[reportUnusedImport]

__all__ = ["model"]

GROUPS = 12


@asynccontextmanager
async def _rollout(model: Path, directory: Path) -> AsyncGenerator[tuple[RolloutActor, Fake, BufferActor], None]:
    """An engine that is busy for as long as anybody looks."""
    run = Run(
        name="test",
        cluster="inprocess",
        model=Checkpoint(str(model)),
        engine=FakeEngine(median_tokens=100_000, sigma=0.0),
        rollout=Rollout(group_size=2, max_tokens=100_000),
        flow=Flow(groups_per_step=GROUPS, groups_per_take=1),
    )
    buffer, reward = BufferActor(run, directory / "trajectories", None), RewardActor(run.reward)
    rollout = RolloutActor(run, model, "rollout-0", buffer, reward)
    engine = rollout._engine  # pyright: ignore[reportPrivateUsage]
    assert isinstance(engine, Fake)
    await rollout.start()
    try:
        yield rollout, engine, buffer
    finally:
        await rollout.close()
        await reward.close()
        await buffer.close()


async def _generate(rollout: RolloutActor, buffer: BufferActor) -> "asyncio.Task[None]":
    work = [(ticket, Prompt(uid=str(ticket.group), text="3+4=")) for ticket in await buffer.admit(1.0)]
    assert len(work) >= GROUPS
    return asyncio.create_task(rollout.generate(work))


def test_running_answers_get_their_tokens_while_groups_arrive(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _rollout(model, tmp_path) as (rollout, engine, buffer):
            taken: list[int] = []
            begin = engine._begin  # pyright: ignore[reportPrivateUsage]

            def noted(request: Request):
                taken.append(engine.stats().steps)
                return begin(request)

            engine._begin = noted  # pyright: ignore[reportPrivateUsage]
            generating = await _generate(rollout, buffer)
            while len(taken) < 2 * GROUPS:  # noqa: ASYNC110  (it is counted in this very loop)
                await asyncio.sleep(0)
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
            firsts = taken[:: 2 * AT_ONCE]
            assert taken == [first for first in firsts for _ in range(2 * AT_ONCE)], "some groups come together"
            assert len(firsts) == 3
            between = [later - earlier for earlier, later in pairwise(firsts[1:])]
            assert min(between) >= 1, "a step from those to the next, once the engine has work"

    asyncio.run(scenario())


def test_the_answer_to_a_probe_takes_two_steps_of_a_busy_engine(model: Path, tmp_path: Path) -> None:
    """One that computes it, and at most one more until all readers have told whoever asked."""

    async def scenario() -> None:
        async with _rollout(model, tmp_path) as (rollout, engine, buffer):
            generating = await _generate(rollout, buffer)
            while engine.stats().running < 2 * GROUPS:  # noqa: ASYNC110  (it is counted in this very loop)
                await asyncio.sleep(0)
            before = engine.stats().steps
            probe = Probe(((1, 2), (3, 4), (5, 6)), (0.0,) * 3, 100.0)
            gap = await rollout._probe(probe, 1)  # pyright: ignore[reportPrivateUsage]
            assert gap > 0
            assert engine.stats().steps - before <= 2
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    asyncio.run(scenario())
