"""A gateway in a thread, so that clients may block, with a sampler whose replies are written down."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.gateway import GatewayServer, SampledTokens
from asyncrl.gateway.record import Chat
from asyncrl.types import Finish, Request, Sampling, Segment
from asyncrl.user_code.agents import Access
from tests.support.character_chat import END, CharacterChat, encode

T = TypeVar("T")
Replies = Callable[[Request], str]


def spoken(text: str, room: int, version: int = 3) -> SampledTokens:
    """A reply as an engine samples it, cut off where there is no room for its end."""
    ids = [*encode(text), END]
    finish: Finish = "stop" if len(ids) <= room else "length"
    ids = ids[:room]
    return SampledTokens((Segment.sampled(ids, [-0.25] * len(ids), version),), finish)


class Script:
    """Says the replies one after the other; holds calls back while `go` is not set."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.requests: list[Request] = []
        self.cancelled = threading.Event()
        self.begun = threading.Event()
        self.held = False

    async def __call__(self, request: Request) -> SampledTokens:
        self.requests.append(request)
        self.begun.set()
        try:
            if self.held:
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            return SampledTokens(spoken("half", 4).segments, "abort")
        return spoken(self.replies.pop(0), request.sampling.max_tokens)


class RunningGateway:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: GatewayServer) -> None:
        self._loop = loop
        self.server = server

    def do(self, awaitable: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(30)

    def open(
        self, sampler: Callable[[Request], Awaitable[SampledTokens]], name: str = "1-0", max_tokens: int = 2000
    ) -> Access:
        async def opened() -> Access:
            return self.server.open(name, sampler, Sampling(max_tokens=max_tokens, stop=(END,)), seed=7)

        return self.do(opened())


@contextmanager
def running_gateway(chat: Chat | None = None, **options: Any) -> Iterator[RunningGateway]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        gateway = RunningGateway(loop, GatewayServer(chat or CharacterChat(), **options))
        gateway.do(gateway.server.start())
        try:
            yield gateway
        finally:
            gateway.do(gateway.server.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
