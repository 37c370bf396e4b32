"""The calls of episodes, from the gateway to the engine that plays each episode, and back.

An engine fetches its calls with `fetch`, which waits until there are some, and brings them back with `answer`. An
episode belongs to the engine that was bound to it last. When that one has died or leaves, another is bound, and calls
that were under way go on there from the tokens that are known: whoever made them sees a delay only.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from asyncrl.errors import EngineError
from asyncrl.gateway.record import SampledTokens
from asyncrl.types import Finish, Request, Segment

HELD_OUT = "held_out."
"""Begins the names of episodes that no other engine goes on with, and that are never recorded."""
WAIT_S = 10.0
"""An engine without calls asks again after so long."""


class Call(msgspec.Struct, frozen=True):
    """A request that an engine is to run, under an id that is another one each time it is given away."""

    episode: str
    request: Request
    deadline: float


class Work(msgspec.Struct, frozen=True):
    """For an engine."""

    calls: tuple[Call, ...] = ()
    aborted: tuple[str, ...] = ()
    """Requests that nobody waits for any more."""


class Sampled(msgspec.Struct, frozen=True):
    """What an engine made of a request."""

    request: str
    segments: tuple[Segment, ...]
    finish: Finish
    """`abort`: it goes on elsewhere, if anybody waits for it."""
    wasted: int = 0
    """Tokens of versions that failed their probe."""
    error: str = ""


class _Episode:
    def __init__(self) -> None:
        self.engine = ""
        self.deadline = 0.0
        self.waiting: list[_Open] = []
        """Calls that no engine has."""
        self.given: dict[str, _Open] = {}
        """Those that its engine has, some of them given up."""
        self.wasted = 0


class _Open:
    """A call that is not answered yet."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._begun: tuple[Segment, ...] = ()
        """Sampled by engines before the present one."""
        self.noted: tuple[Segment, ...] = ()
        """Sampled by the present one."""
        self.over: asyncio.Future[SampledTokens] = asyncio.get_running_loop().create_future()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (*self._begun, *self.noted)

    def resumed(self, number: int) -> Request:
        """For another engine, from where it is."""
        self._begun, self.noted = self.segments, ()
        return msgspec.structs.replace(self._request.after(self._begun), id=f"{self._request.id}#{number}")


class _Engine:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.news = asyncio.Event()
        self.number = 0
        self.last = Work()


class Calls:
    def __init__(self) -> None:
        self._episodes: dict[str, _Episode] = {}
        self._engines: dict[str, _Engine] = {}
        self._given: dict[str, _Episode] = {}
        """By the request's id."""
        self._number = 0

    # -- episodes ------------------------------------------------------------------------------------------------

    def begin(self, episode: str) -> None:
        self._episodes[episode] = _Episode()

    def bind(self, episode: str, engine: str, deadline: float) -> None:
        """This engine runs the calls of the episode from now on."""
        found = self._episodes[episode]
        found.deadline = deadline
        if found.engine != engine:
            self.unbind(episode)
            found.engine = engine
            waiting, found.waiting = found.waiting, []
            for call in waiting:
                self._give(episode, found, call)

    def unbind(self, episode: str) -> None:
        """No engine runs them; what the last one still says of them is ignored."""
        found = self._episodes[episode]
        for request, call in found.given.items():
            del self._given[request]
            if call.over.done():
                found.wasted += _tokens(call.segments)
            else:
                found.waiting.append(call)
        found.engine, found.given = "", {}

    async def sample(self, episode: str, request: Request) -> SampledTokens:
        """By whichever engine plays the episode; to be cancelled at will."""
        found = self._episodes[episode]
        call = _Open(request)
        if found.engine:
            self._give(episode, found, call)
        else:
            found.waiting.append(call)
        try:
            return await call.over
        except asyncio.CancelledError:
            call.over.cancel()
            with suppress(ValueError):
                found.waiting.remove(call)
            self._abort(found, [name for name, each in found.given.items() if each is call])
            raise

    def end(self, episode: str) -> int:
        """No more calls; returns how many tokens were sampled for those that were given up."""
        found = self._episodes[episode]
        self._abort(found, found.given)
        self.unbind(episode)
        for call in found.waiting:
            found.wasted += _tokens(call.segments)
            if not call.over.done():
                call.over.set_exception(EngineError("the episode is over"))
        del self._episodes[episode]
        return found.wasted

    def _give(self, episode: str, found: _Episode, call: _Open) -> None:
        self._number += 1
        request = call.resumed(self._number)
        found.given[request.id] = call
        self._given[request.id] = found
        engine = self._engine(found.engine)
        engine.calls.append(Call(episode, request, found.deadline))
        engine.news.set()

    def _abort(self, found: _Episode, requests: Iterable[str]) -> None:
        if names := list(requests):
            engine = self._engine(found.engine)
            engine.aborted += names
            engine.news.set()

    # -- engines -------------------------------------------------------------------------------------------------

    async def fetch(self, engine: str, received: int) -> tuple[int, Work]:
        """New work and its number, or none after `WAIT_S`. `received` is the last number that arrived: what was lost on
        the way is sent again."""
        found = self._engine(engine)
        if found.number <= received:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await found.news.wait()
        if found.number <= received:
            found.news.clear()
            found.number += 1
            wanted = [call for call in found.calls if call.request.id not in found.aborted]
            found.last = Work(tuple(wanted), tuple(found.aborted))
            found.calls, found.aborted = [], []
        return found.number, found.last

    def note(self, begun: Mapping[str, tuple[Segment, ...]]) -> None:
        """How far requests have come, in case that their engine dies."""
        for request, segments in begun.items():
            if (found := self._given.get(request)) is not None:
                found.given[request].noted = segments

    def answer(self, sampled: Sequence[Sampled]) -> None:
        for said in sampled:
            if (found := self._given.pop(said.request, None)) is not None:  # else another engine has it by now
                self._answer(found, found.given.pop(said.request), said)

    def _answer(self, found: _Episode, call: _Open, said: Sampled) -> None:
        call.noted = said.segments
        found.wasted += said.wasted
        if call.over.done():
            found.wasted += _tokens(call.segments)
        elif said.error:
            call.over.set_exception(EngineError(said.error))
        elif said.finish == "abort":
            found.waiting.append(call)
        else:
            call.over.set_result(SampledTokens(call.segments, said.finish))

    def forget_earlier(self, engine: str) -> list[str]:
        """Engines of its name that were there before: NAME...., and their processes are gone."""
        name, _, _ = engine.rpartition(".")
        earlier = [each for each in self._engines if each.rpartition(".")[0] == name and each != engine]
        for each in earlier:
            del self._engines[each]
        return earlier

    def _engine(self, name: str) -> _Engine:
        return self._engines.setdefault(name, _Engine())


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(map(len, segments))
