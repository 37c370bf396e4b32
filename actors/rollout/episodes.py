"""The engine's side of episodes: it fetches what harnesses ask the gateway for, samples it, and answers.

Each call is a request of its own. Its tokens leave when the version that sampled the last of them has passed its probe;
what a bad version sampled is sampled again. Answers that come together travel together.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from actors.gateway.actor import GatewayActor, Play, Played
from actors.gateway.calls import HELD_OUT, Call, Sampled
from actors.rollout.generation import CompletionGenerator
from actors.rollout.quarantine import Quarantine
from actors.runtime.background import retrieve_exception
from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError
from asyncrl.types import Finish, Segment


class EpisodePlayer:
    """One per engine. An engine that was started again is another one to the gateway."""

    def __init__(
        self,
        name: str,
        gateway: GatewayActor,
        engine: Engine,
        generator: CompletionGenerator,
        quarantine: Quarantine,
        *,
        served: Callable[[], int],
        samples: Callable[[str, bool], None],
    ) -> None:
        """`served`: the version that has passed its probe. `samples` is told whether the engine works for an episode,
        or its harness does."""
        self.name = f"{name}.{secrets.token_hex(4)}"
        self._gateway, self._engine, self._generator, self._quarantine = gateway, engine, generator, quarantine
        self._served, self._samples = served, samples
        self.begun: dict[str, tuple[Segment, ...]] = {}
        """Segments of running requests, up to the last weight update."""
        self._playing: set[str] = set()
        self._working = Counter[str]()
        self._requests: set[asyncio.Task[None]] = set()
        self._answers: list[Sampled] = []
        self._answering: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[Played | None] = asyncio.get_running_loop().create_future()
        self._fetching = asyncio.create_task(self._fetch())

    async def play(self, episode: str, play: Play) -> Played | None:
        """None where another engine goes on with it. Raises what makes this engine, or the gateway, of no use."""
        self._playing.add(episode)
        playing = asyncio.create_task(self._gateway.play(self.name, episode, play))
        try:
            await asyncio.wait([playing, self._broken], return_when=asyncio.FIRST_COMPLETED)
            return playing.result() if playing.done() else self._broken.result()
        finally:
            playing.cancel()
            self._playing.discard(episode)

    async def drop(self, episodes: list[str]) -> None:
        """The gateway can forget them."""
        await self._gateway.drop(episodes)

    async def _fetch(self) -> None:
        received = 0
        try:
            while True:
                received, work = await self._gateway.fetch(self.name, received)
                for request in work.aborted:
                    await self._engine.abort(request)
                for call in work.calls:
                    task = asyncio.create_task(self._run(call))
                    self._requests.add(task)
                    task.add_done_callback(self._requests.discard)
        except Exception as error:
            self._break(error)

    async def _run(self, call: Call) -> None:
        self._tell(call.episode, 1)
        try:
            sampled = await self._sample(call)
        except EngineError as error:
            if self._engine.refusal:
                return self._break(error)  # other engines have to continue its calls
            sampled = Sampled(call.request.id, (), "abort", error=str(error))
        except Exception as error:
            return self._break(error)
        finally:
            self.begun.pop(call.request.id, None)
            self._tell(call.episode, -1)
        self._answers.append(sampled)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())

    async def _sample(self, call: Call) -> Sampled:
        name, request, segments, wasted = call.request.id, call.request, tuple[Segment, ...](), 0
        held_out = call.episode.startswith(HELD_OUT)
        while not self._generator.leaving or held_out:
            keep = partial(self._keep, name, segments)
            if held_out:
                answer = await self._generator.answer(request, call.deadline, keep=keep)
                return Sampled(name, answer.segments, answer.finish)
            with self._quarantine.running(name):
                answer = await self._generator.answer(request, call.deadline, keep=keep)
                self.begun.pop(name, None)  # nobody may go on from it before it is known to be sound
                spoiled = await self._quarantine.spoiled(name)
            if not spoiled:
                return Sampled(name, (*segments, *answer.segments), answer.finish, wasted)
            sound = tuple(takewhile(lambda segment: segment.version <= self._served(), answer.segments))
            if answer.finish != "abort" and len(sound) == len(answer.segments):  # over before the bad version came
                return Sampled(name, (*segments, *sound), answer.finish, wasted)
            wasted += answer.sampled_tokens - sum(map(len, sound))
            segments, request = (*segments, *sound), request.after(sound)
        aborted: Finish = "abort"
        return Sampled(name, segments, aborted, wasted)

    def _keep(self, request: str, before: tuple[Segment, ...], segments: tuple[Segment, ...]) -> None:
        self.begun[request] = (*before, *segments)

    def _tell(self, episode: str, more: int) -> None:
        self._working[episode] += more
        if not self._working[episode]:
            del self._working[episode]
        self._samples(episode, episode in self._working)

    async def _answer(self) -> None:
        try:
            while self._answers:
                ready, self._answers = self._answers, []
                await self._gateway.answer(ready)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Whoever plays an episode hears of it, whatever it is: nobody else waits for these tasks."""
        if not self._broken.done():
            self._broken.set_exception(error)
            retrieve_exception(self._broken)

    async def leave(self) -> None:
        """After `drain`: other engines go on with what is open, from its last token."""
        while self._requests - {task for task in self._requests if task.done()}:
            await asyncio.wait(self._requests)
        if self._answering is not None:
            await self._answering
        await self._gateway.leave(self.name, [each for each in self._playing if not each.startswith(HELD_OUT)])

    async def close(self) -> None:
        self._fetching.cancel()
        tasks = [self._fetching, *self._requests, *([self._answering] if self._answering else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
