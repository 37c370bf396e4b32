"""The gateway actor: it plays episodes of the user's harness, which samples from it over HTTP.

    rollout actor --- play(slot) ----------> harness pool: the user's function, or a program
                                                | HTTP with the key of its episode
                  <-- fetch: calls to sample -- record: tokens as they were sampled
                  --- answer ---------------->  |
                  <-- Played -----------------  result

It outlives engines. When another engine asks for the same slot, it goes on with the episode that is open.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import msgspec

from actors.gateway.calls import HELD_OUT, Calls, Sampled, Work
from actors.runtime.background import retrieve_exception
from actors.runtime.resources import own_address
from asyncrl.chat import chat_format
from asyncrl.config import Run
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.drop_reasons import DropReason
from asyncrl.fleet.placement import HERE
from asyncrl.gateway.record import EpisodeRecord
from asyncrl.gateway.server import GatewayServer
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.types import GIVEN, Episode, Finish, Prompt, Sampling, Segment
from asyncrl.user_code.agents import EpisodeResult, Task
from asyncrl.user_code.failures import CallRecord, Failures
from asyncrl.user_code.in_process import make_harness_pool
from asyncrl.user_code.pool import check_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from asyncrl.user_code.score import Score

LOOPBACK = "127.0.0.1"
KEPT_S = 60.0
"""After its deadline an episode is forgotten whose engine has not fetched it."""


class Play(msgspec.Struct, frozen=True):
    """How an episode is played."""

    prompt: Prompt
    sampling: Sampling
    seed: int
    deadline: float


class Played(msgspec.Struct, frozen=True):
    """An episode that is over."""

    segments: tuple[Segment, ...]
    episode: Episode
    judged: RewardInput
    """For the reward function."""
    score: Score | None
    """The reward itself, where the harness gave it."""
    failure: RewardFailure | None
    finish: Finish
    started: float
    finished: float

    @property
    def sampled_tokens(self) -> int:
        """Those in vain included."""
        sampled = sum(len(segment) for segment in self.segments if segment.version != GIVEN)
        return sampled + self.episode.wasted_tokens


class _Open:
    """An episode that is played, or waits to be fetched."""

    def __init__(self, engine: str, deadline: float) -> None:
        self.engine, self.deadline = engine, deadline
        self.over: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        self.over.add_done_callback(retrieve_exception)
        self.moved = asyncio.Event()
        """Set when `engine` no longer plays it."""
        self.playing: asyncio.Task[None] | None = None
        self.limit: asyncio.Timeout | None = None
        """While its harness plays."""

    def move(self, engine: str, deadline: float) -> None:
        """Another engine plays it from now on, which may come at any moment, the deadline included."""
        self.moved.set()
        self.engine, self.moved, self.deadline = engine, asyncio.Event(), deadline
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(_loop_time(deadline))


class GatewayActor:
    """Owns the HTTP server and the processes of the harness."""

    IDEMPOTENT = frozenset({"play", "fetch", "answer", "note", "leave", "drop", "failures", "close"})

    def __init__(self, run: Run, model_path: Path) -> None:
        self._run = run
        self._calls = Calls()
        self._pool = make_harness_pool(run.agent)
        self._server = GatewayServer(
            chat_format(load_tokenizer(model_path), run.agent.tool_format),
            host=LOOPBACK if run.cluster in HERE else own_address(),
            history=run.agent.history,
            context=run.engine.length_limit or 0,
        )
        self._episodes: dict[str, _Open] = {}
        self._record = CallRecord(run.agent)
        self._activity = Activity()

    async def start(self) -> None:
        """Raise ConfigError if the harness cannot be used here."""
        await asyncio.to_thread(check_function, self._run.agent)
        await self._server.start()

    # -- engines -------------------------------------------------------------------------------------------------

    async def play(self, engine: str, episode: str, play: Play) -> Played | None:
        """An episode to its end, with this engine from now on; None when another one has taken it over. One that is
        open is gone on with, and one that has ended stays until `drop`."""
        if (found := self._episodes.get(episode)) is None:
            found = self._episodes[episode] = _Open(engine, play.deadline)
            self._calls.begin(episode)
            self._calls.bind(episode, engine, play.deadline)
            found.playing = asyncio.create_task(self._to_the_end(episode, found, play))
        elif found.engine != engine:
            found.move(engine, play.deadline)
            if not found.over.done():
                self._calls.bind(episode, engine, play.deadline)
        moved = asyncio.create_task(found.moved.wait())
        try:
            await asyncio.wait([found.over, moved], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        return found.over.result() if found.over.done() and not found.over.cancelled() else None

    async def fetch(self, engine: str, received: int) -> tuple[int, Work]:
        """Calls for an engine, and the number to ask with for the next."""
        if not received:
            await self._succeed(engine)
        return await self._calls.fetch(engine, received)

    async def note(self, begun: dict[str, tuple[Segment, ...]]) -> None:
        self._calls.note(begun)

    async def answer(self, sampled: list[Sampled]) -> None:
        self._calls.answer(sampled)

    async def leave(self, engine: str, episodes: Collection[str]) -> None:
        """It plays these no further; others may take them over."""
        for name in episodes:
            found = self._episodes.get(name)
            if found is not None and found.engine == engine and not found.over.done():
                self._calls.unbind(name)
                found.engine = ""
                found.moved.set()

    async def _succeed(self, engine: str) -> None:
        """An engine that was started again: nobody waits for the held-out episodes of the one before."""
        for before in self._calls.forget_earlier(engine):
            held_out = [name for name in self._episodes if name.startswith(HELD_OUT)]
            await self.drop([name for name in held_out if self._episodes[name].engine == before])

    async def drop(self, episodes: Sequence[str]) -> None:
        """Their results have arrived, or nobody wants them any more."""
        for name in episodes:
            if (found := self._episodes.pop(name, None)) is not None and found.playing is not None:
                found.playing.cancel()

    # -- episodes ------------------------------------------------------------------------------------------------

    async def _to_the_end(self, name: str, found: _Open, play: Play) -> None:
        try:
            found.over.set_result(await self._play(name, found, play))
        except Exception as error:
            found.over.set_exception(error)  # not the harness's: whoever asked for the episode gets it
        finally:
            found.over.cancel()  # if it was dropped
        asyncio.get_running_loop().call_at(_loop_time(found.deadline) + KEPT_S, self._episodes.pop, name, None)

    async def _play(self, name: str, found: _Open, play: Play) -> Played:
        started, prompt = time.time(), play.prompt
        access = self._server.open(name, partial(self._calls.sample, name), sampling=play.sampling, seed=play.seed)
        result: EpisodeResult | RewardFailure
        try:
            async with asyncio.timeout_at(_loop_time(found.deadline)) as found.limit:
                result = await self._pool.play(Task(name, prompt.text, prompt.answer, access))
        except TimeoutError:
            result = RewardFailure(DropReason.TIMEOUT, "its group's time was up (flow.group_timeout_s)")
        finally:
            found.limit = None
            record = await self._server.end(name)
            wasted = self._calls.end(name)
        return self._played(prompt, record, result, wasted, started)

    def _played(
        self, prompt: Prompt, record: EpisodeRecord, result: EpisodeResult | RewardFailure, wasted: int, started: float
    ) -> Played:
        given = result if isinstance(result, EpisodeResult) else EpisodeResult()
        failure = result if isinstance(result, RewardFailure) else None
        try:
            segments, episode = record.trajectory(given.turn_rewards)
        except ValueError as error:
            failure = failure or RewardFailure(DropReason.AGENT_INVALID, str(error))
            segments, episode = record.trajectory()
        if failure is None and not episode.turns:
            message = "it ended without a call of the model: is its client given access.url and access.key?"
            failure = RewardFailure(DropReason.AGENT_INVALID, message)
        turns = record.texts
        completion = turns[-1] if given.text is None and turns else given.text or ""
        judged = RewardInput(prompt.text, completion, prompt.answer, turns)
        if failure is None or failure.reason != DropReason.TIMEOUT:
            self._record.add(judged, failure)
        return Played(
            segments=segments,
            episode=msgspec.structs.replace(episode, wasted_tokens=episode.wasted_tokens + wasted),
            judged=judged,
            score=given.reward,
            failure=failure,
            finish="length" if record.out_of_room else "stop",
            started=started,
            finished=time.time(),
        )

    # -- state ---------------------------------------------------------------------------------------------------

    async def failures(self) -> Failures:
        """The first failures of the harness, and whether it fails always."""
        return Failures(first=self._record.first, always=self._record.always)

    def situation(self) -> Situation:
        said = self._activity.situation()
        return msgspec.structs.replace(said, judging=self._pool.judging, queued=self._pool.queued)

    async def close(self) -> None:
        tasks = [found.playing for found in self._episodes.values() if found.playing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()
        await self._server.close()


def _loop_time(wall: float) -> float:
    return asyncio.get_running_loop().time() + wall - time.time()
