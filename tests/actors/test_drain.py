"""Answers of an engine that died go on at another one from where they were at the last weight update, those of one that
was told to leave from where they are."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from actors.rollout.actor import RolloutActor
from asyncrl.data.arrow import decode
from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError
from asyncrl.types import GIVEN, Delta, Prompt, Request, Slot, Trajectory
from tests.actors.test_publisher import Scene, model, scene  # pyright: ignore[reportUnusedImport]

__all__ = ["model"]


async def _stored(at: Scene, groups: int) -> dict[Slot, Trajectory]:
    found: dict[Slot, Trajectory] = {}
    taken = 0
    while taken < groups:
        delivery = await at.buffer.take(1, groups - taken, 30.0)
        taken += len(delivery.groups)
        found |= {t.slot: t for t in map(decode, await at.buffer.read(delivery))}
    return found


def test_answers_go_on_elsewhere_with_their_tokens_versions_and_log_probabilities(model: Path, tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(model, tmp_path, probe=False) as at:
            run = at.rollout._run  # pyright: ignore[reportPrivateUsage]
            generating = await at.answering()
            await at.rollout._engine.pause()  # pyright: ignore[reportPrivateUsage]  (or they would be over too soon)
            at.trainer.move()
            await at.publisher.publish()
            async with asyncio.timeout(30):
                while not at.buffer._begun:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]
                    await asyncio.sleep(0)
            generating.cancel()  # as if its process were gone: nothing that it samples from now on is seen
            await asyncio.gather(generating, return_exceptions=True)
            tickets, begun = await at.buffer.reassign([0, 1])
            assert len(begun) == 2
            assert sum(len(ticket.samples) for ticket in tickets) == 4

            other = RolloutActor(run, model, "rollout-1", at.buffer, at.reward)
            await other.start()
            served = at.rollout._served  # pyright: ignore[reportPrivateUsage]
            assert served is not None
            await other.load_weights(served)
            prompts = [(ticket, Prompt(uid=str(ticket.group), text="3+4=")) for ticket in tickets]
            await other.generate(prompts, begun)
            stored = await _stored(at, 2)
            await other.close()

            assert len(stored) == 4
            for slot, parts in begun.items():
                answer = stored[slot]
                first = np.concatenate([part.tokens for part in parts])
                sampled = answer.versions != GIVEN
                assert answer.tokens[sampled][: len(first)].tolist() == first.tolist()
                assert answer.logprobs[sampled][: len(first)].tolist() == parts[0].logprobs.tolist()
                assert answer.versions[sampled].tolist() == [0] * len(first) + [1] * (sampled.sum() - len(first))
                assert answer.engine == "rollout-1"

    asyncio.run(check())


def test_an_engine_that_leaves_hands_over_every_token_and_nothing_changes(model: Path, tmp_path: Path) -> None:
    async def answers(directory: Path, *, leave: bool) -> tuple[dict[Slot, Trajectory], int]:
        async with scene(model, directory, probe=False) as at:
            generating = await at.answering()
            if not leave:
                await generating
                return await _stored(at, 2), 0
            await at.rollout.drain()
            await asyncio.wait_for(generating, 30)
            late = (await at.buffer.admit(0.0)) or []
            assert not late, "every place is taken by the groups that are handed over"
            tickets, begun = await at.buffer.reassign([0, 1])
            other = RolloutActor(at.rollout._run, model, "rollout-1", at.buffer, at.reward)  # pyright: ignore[reportPrivateUsage]
            await other.start()
            prompts = [(ticket, Prompt(uid=str(ticket.group), text="3+4=")) for ticket in tickets]
            await at.rollout.generate(prompts, begun)  # it came too late: nothing is begun there any more
            assert (await at.rollout.stats()).running == 0
            tickets, begun = await at.buffer.reassign([0, 1])
            await other.generate(prompts, begun)
            stored = await _stored(at, 2)
            await other.close()
            return stored, sum(len(part) for parts in begun.values() for part in parts)

    async def check() -> None:
        undisturbed, _ = await answers(tmp_path / "a", leave=False)
        handed_over, tokens = await answers(tmp_path / "b", leave=True)
        assert tokens >= 6, "what was sampled is not sampled again"
        assert {slot: t.tokens.tolist() for slot, t in handed_over.items()} == {
            slot: t.tokens.tolist() for slot, t in undisturbed.items()
        }
        for slot, trajectory in handed_over.items():
            np.testing.assert_allclose(trajectory.logprobs, undisturbed[slot].logprobs, atol=1e-4)

    asyncio.run(check())


class Broken:
    """An engine that can serve nothing any more."""

    refusal = "its device is lost"

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        raise EngineError(self.refusal)


def test_an_engine_of_no_use_says_so_in_its_own_words(model: Path, tmp_path: Path) -> None:
    """Not as a group of errors: the pool looks at the kind, and has others continue its samples."""

    async def check() -> None:
        async with scene(model, tmp_path, probe=False) as at:
            serving = at.rollout._engine  # pyright: ignore[reportPrivateUsage]
            at.rollout._generator._engine = at.rollout._engine = cast(Engine, Broken())  # pyright: ignore[reportPrivateUsage]
            prompts = [(ticket, Prompt(uid="0", text="3+4=")) for ticket in await at.buffer.admit(1.0)]
            try:
                with pytest.raises(EngineError, match="its device is lost"):
                    await at.rollout.generate(prompts)
            finally:
                at.rollout._engine = serving  # pyright: ignore[reportPrivateUsage]

    asyncio.run(check())
