"""The engine's side of episodes, without a harness: one engine, and the calls that a gateway has for it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.gateway.actor import Play
from actors.gateway.calls import Calls, Sampled, Work
from actors.rollout.episodes import EpisodePlayer
from actors.rollout.generation import CompletionGenerator
from actors.rollout.quarantine import Quarantine
from asyncrl.config import Run
from asyncrl.config.engine import FakeEngine as Settings
from asyncrl.engines.fake import FakeEngine
from asyncrl.types import Prompt, Request, Sampling

PLAY = Play(Prompt(uid="p", text="3+4="), Sampling(max_tokens=8), 0, time.time() + 1000)


class Gateway:
    """What an engine sees of one: calls, and an episode that does not end."""

    def __init__(self) -> None:
        self.calls = Calls()

    async def play(self, engine: str, episode: str, play: Play) -> None:
        await asyncio.Event().wait()

    async def fetch(self, engine: str, received: int) -> tuple[int, Work]:
        return await self.calls.fetch(engine, received)

    async def answer(self, sampled: list[Sampled]) -> None:
        self.calls.answer(sampled)


class Scene:
    def __init__(self, engine: FakeEngine | None = None, gateway: Gateway | None = None) -> None:
        self.engine = engine or FakeEngine(Settings(median_tokens=6, sigma=0.0), name="e", version=0)
        self.gateway, self.quarantine = gateway or Gateway(), Quarantine()
        generator = CompletionGenerator(Run(), self.engine, None, None)  # type: ignore[arg-type]
        self.player = EpisodePlayer(
            "e", self.gateway, self.engine, generator, self.quarantine, served=lambda: 0, samples=lambda *_: None
        )  # type: ignore[arg-type]
        self.gateway.calls.begin("0.0")
        self.gateway.calls.bind("0.0", self.player.name, time.time() + 1000)


def _request(sampling: Sampling) -> Request:
    return Request(id="0.0/0", tokens=(1, 2), sampling=sampling, seed=7)


@asynccontextmanager
async def playing(at: Scene) -> AsyncGenerator[Scene, None]:
    await at.engine.start()
    try:
        yield at
    finally:
        await at.engine.close()
        await at.player.close()


@pytest.mark.parametrize(("max_tokens", "finish"), [(100, "stop"), (3, "length")])
def test_what_was_finished_and_sound_stays_when_a_later_version_fails(max_tokens: int, finish: str) -> None:
    """It ended before the new version was loaded, and waited for its probe."""
    request = _request(Sampling(max_tokens=max_tokens, stop=(5,)))

    async def scenario() -> None:
        async with playing(Scene()) as at:
            expected, _ = at.engine.answer(request)
            async with at.quarantine.hold():
                sampling = asyncio.create_task(at.gateway.calls.sample("0.0", request))
                while at.engine.stats().generated_tokens < len(expected) or at.engine.stats().running:  # noqa: ASYNC110  (a counter)
                    await asyncio.sleep(0)
                at.quarantine.reject()
            sampled = await sampling
            assert [token for segment in sampled.segments for token in segment.tokens.tolist()] == expected.tolist()
            assert sampled.finish == finish

    asyncio.run(scenario())


class BrokenEngine(FakeEngine):
    def submit(self, request: Request) -> Any:
        raise RuntimeError("a bug in the engine")


class BrokenGateway(Gateway):
    async def fetch(self, engine: str, received: int) -> tuple[int, Work]:
        raise RuntimeError("a bug in the gateway")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("broken", ["engine", "gateway"])
def test_an_error_that_nobody_knows_ends_the_episodes_and_not_their_time(broken: str) -> None:
    async def scenario() -> None:
        at = Scene(BrokenEngine(Settings(), name="e")) if broken == "engine" else Scene(gateway=BrokenGateway())
        async with playing(at):
            sampling = asyncio.create_task(at.gateway.calls.sample("0.0", _request(Sampling(max_tokens=8))))
            with pytest.raises(RuntimeError, match="a bug in the"):
                await at.player.play("0.0", PLAY)
            sampling.cancel()

    asyncio.run(scenario())
