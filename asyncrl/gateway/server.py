"""The gateway: who may call, and where. Each episode has a URL and a key of its own; nothing else is answered."""

import asyncio
import re
import secrets
from typing import TYPE_CHECKING

from asyncrl.gateway.episode import OpenEpisode, Sampler
from asyncrl.gateway.errors import CallError
from asyncrl.gateway.record import Chat, EpisodeRecord, History
from asyncrl.system.optional import require
from asyncrl.types import Sampling
from asyncrl.user_code.agents import Access

if TYPE_CHECKING:
    from asyncrl.gateway.http import HttpServer

NAME = re.compile(r"[\w.~-]+", re.ASCII)
NO_KEY = secrets.token_urlsafe(32)
"""In place of the key of an episode that is not open."""


class GatewayServer:
    """All of it runs in one event loop."""

    def __init__(self, chat: Chat, *, host: str = "127.0.0.1", history: History = "keep", context: int = 0) -> None:
        """`context`: tokens that the model can see at once, 0: no bound."""
        self.closing = False
        self._chat = chat
        self._host = host
        self._history: History = history
        self._context = context
        self._episodes: dict[str, OpenEpisode] = {}
        self._http: HttpServer | None = None

    async def start(self) -> None:
        for module in ("starlette", "uvicorn"):
            require(module, extra="agents")
        from asyncrl.gateway.http import HttpServer

        self._http = HttpServer(self, self._host)
        await self._http.start()

    @property
    def url(self) -> str:
        """Of the server; each episode has its own below."""
        if self._http is None:
            raise RuntimeError("the gateway is not started; await start() first")
        return self._http.url

    def open(self, name: str, sampler: Sampler, sampling: Sampling, seed: int) -> Access:
        """Begin an episode. `sampling` is that of each call; its `max_tokens` bounds all tokens after the first prompt.
        `name` goes into the URL and the ids of requests."""
        if not NAME.fullmatch(name):
            raise ValueError(f"episode {name!r} cannot be a part of a URL; use letters, digits and -._~")
        if name in self._episodes:
            raise ValueError(f"episode {name} is open already; end it first")
        record = EpisodeRecord(self._chat, max_tokens=sampling.max_tokens, context=self._context, history=self._history)
        opened = self._episodes[name] = OpenEpisode(name, self._chat, record, sampler, sampling, seed)
        return Access(f"{self.url}/e/{name}/v1", opened.key)

    def episode(self, name: str) -> OpenEpisode:
        """An open one, for calls without HTTP."""
        return self._episodes[name]

    def authorised(self, name: str, key: str) -> OpenEpisode:
        """The episode that the key is for; it takes as long for a wrong key as for a wrong name."""
        opened = self._episodes.get(name)
        right = secrets.compare_digest(key.encode(), (NO_KEY if opened is None else opened.key).encode())
        if opened is None or not right:
            raise CallError(401, "there is no open episode with this key", code="invalid_api_key")
        if self.closing:
            raise CallError(503, "the run ends", code="run_ends")
        return opened

    async def end(self, name: str) -> EpisodeRecord:
        """Its key is dead from now on, and what is being sampled is dropped."""
        return await self._episodes.pop(name).end()

    async def close(self) -> None:
        """End all episodes and the server; idempotent."""
        self.closing = True
        await asyncio.gather(*(episode.end() for episode in self._episodes.values()))
        if self._http is not None:
            await self._http.close()
        self._episodes.clear()
