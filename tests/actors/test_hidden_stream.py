"""Hidden states from a rollout actor to a drafter: sent once, and never waited for."""

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch

from actors.drafter.actor import DrafterActor
from actors.drafter.hidden_stream import HiddenStream
from actors.rollout.actor import RolloutActor
from asyncrl.config.drafter import DrafterTraining, Eagle3Drafter
from asyncrl.data.arrow import decode as decode_trajectory
from asyncrl.drafting.checkpoint import fresh_head, save_head
from asyncrl.drafting.windows import Window, decode
from asyncrl.models.config import read_config
from asyncrl.types import GIVEN, Prompt, Trajectory
from tests.actors.test_publisher import Scene, model, scene  # pyright: ignore[reportUnusedImport]
from tests.support.draft_windows import random_window

__all__ = ["model"]


class Drafter:
    """Takes windows in, as soon as it may go on."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.calls = self.dropped = 0
        self.windows: list[Window] = []

    async def collect(self, payload: bytes, dropped: int = 0) -> None:
        self.calls += 1
        await self.goes_on.wait()
        self.windows += decode(payload)
        self.dropped += dropped


async def _answer(at: Scene, model: Path, folder: Path, drafter: Drafter) -> list[Trajectory]:
    """Two groups by an engine of its own, which drafts, and gives hidden states."""
    head = Eagle3Drafter(path=str(folder), training=DrafterTraining(source="rollout"))
    save_head(fresh_head(head, read_config(model), 0), folder)
    run = msgspec.structs.replace(at.rollout._run, drafter=head)  # pyright: ignore[reportPrivateUsage]
    rollout = RolloutActor(run, model, "rollout-1", at.buffer, at.reward, cast(DrafterActor, drafter))
    await rollout.start()
    tickets = (await at.buffer.admit(1.0))[:2]
    async with asyncio.timeout(60):
        await rollout.generate([(ticket, Prompt(uid=str(ticket.group), text="3+4=")) for ticket in tickets])
        deliveries = [await at.buffer.take(1, 1, 30.0) for _ in tickets]
    await rollout.close()
    return [decode_trajectory(payload) for each in deliveries for payload in await at.buffer.read(each)]


def test_answers_are_stored_while_a_stopped_drafter_takes_nothing_in(model: Path, tmp_path: Path) -> None:
    drafter = Drafter()

    async def scenario() -> list[Trajectory]:
        async with scene(model, tmp_path / "run", probe=False) as at:
            stored = await _answer(at, model, tmp_path / "head", drafter)
            assert (drafter.calls, drafter.windows) == (1, []), "it has begun to take the first ones in"
            drafter.goes_on.set()
            while drafter.calls < 2 or len(drafter.windows) + drafter.dropped < len(stored):  # noqa: ASYNC110
                await asyncio.sleep(0)
            return stored

    stored = {trajectory.slot: trajectory for trajectory in asyncio.run(scenario())}
    assert len(drafter.windows) == len(stored), "what waited came with the second call"
    for window in drafter.windows:
        answer = stored[window.slot]
        assert window.tokens_T.tolist() == answer.tokens[window.start : -1].tolist()
        assert window.sampled_T.tolist() == (answer.versions != GIVEN)[window.start + 1 :].tolist()
        assert window.answer_length == answer.sampled_tokens
        assert window.hidden_T_E.dtype == torch.bfloat16
        assert np.isfinite(window.hidden_T_E.float().numpy()).all()


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    drafter = Drafter()

    async def scenario() -> None:
        stream = HiddenStream(cast(DrafterActor, drafter), most_tokens=30)
        stream.send([random_window("eagle", 12, seed=0)])
        await asyncio.sleep(0)
        for seed in range(1, 6):
            stream.send([random_window("eagle", 12, seed=seed)])
        drafter.goes_on.set()
        while len(drafter.windows) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [window.slot.group for window in drafter.windows] == [0, 1, 2]
    assert (drafter.calls, drafter.dropped) == (2, 3)
