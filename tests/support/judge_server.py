"""A server with OpenAI's chat completions in a thread of this process, whose faults are those of real ones."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

GOOD = '{"correct": true, "clear": 4}'
Answer = Callable[[str], str]
"""From the text that is asked to the text of the reply."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the calls, between 0 and 1."""

    error: float = 0.0
    """Answered with 500."""
    silence: float = 0.0
    """Never answered."""
    limited: float = 0.0
    """Answered with 429 and `Retry-After`."""
    retry_after: str = "0.05"
    malformed: float = 0.0
    """Half of them no JSON at all, half a completion without grades."""


NO_FAULTS = Faults()


class JudgeServer:
    """What was asked, by whom and how much of it at a time."""

    def __init__(self, answer: Answer, faults: Faults, *, key: str = "", seconds: float = 0.0, seed: int = 0) -> None:
        self._answer, self._faults, self._key, self._seconds = answer, faults, key, seconds
        self._random = random.Random(seed)
        self.status = 0
        """Answer every call with it."""
        self.raw: bytes | None = None
        """Answer every call with this body."""
        self.calls = Counter[str]()
        """By outcome."""
        self.asked: list[str] = []
        """Texts that got a verdict."""
        self.bodies: list[dict[str, Any]] = []
        self.now = self.most = 0
        """Calls at a time."""
        self.url = ""

    async def complete(self, request: Request) -> Response:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._respond(request)
        except ClientDisconnect:
            return Response()
        finally:
            self.now -= 1

    async def _respond(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return self._count("refused", _error(401, f"bad key {request.headers.get('authorization')}"))
        if self.status:
            # Careless servers tell the key in what they answer.
            return self._count("failed", _error(self.status, f"as told; {request.headers.get('authorization')}"))
        if self.raw is not None:
            return self._count("raw", Response(self.raw))
        await asyncio.sleep(self._seconds)
        return await self._faulty(request) or self._count("answered", self._completion(body["messages"][-1]["content"]))

    async def _faulty(self, request: Request) -> Response | None:
        faults, dice = self._faults, self._random.random()
        for share, name in ((faults.error, "error"), (faults.silence, "silence"), (faults.limited, "limited")):
            if dice < share:
                self.calls[name] += 1
                return await self._fault(name, request)
            dice -= share
        if dice < faults.malformed:
            text = "no JSON" if dice < faults.malformed / 2 else _shown("I would rather not say.")
            return self._count("malformed", PlainTextResponse(text))
        return None

    async def _fault(self, name: str, request: Request) -> Response:
        while name == "silence" and not await request.is_disconnected():  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.02)
        if name == "limited":
            return _error(429, "slower, please", {"retry-after": self._faults.retry_after})
        return _error(500, "internal error")

    def _completion(self, text: str) -> Response:
        self.asked.append(text)
        return PlainTextResponse(_shown(self._answer(text)))

    def _count(self, outcome: str, response: Response) -> Response:
        self.calls[outcome] += 1
        return response


def _shown(reply: str) -> str:
    message = {"role": "assistant", "content": reply}
    usage = {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100}
    return json.dumps({"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage})


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


@contextmanager
def judge_server(
    answer: Answer = lambda _: GOOD, faults: Faults = NO_FAULTS, *, key: str = "", seconds: float = 0.0
) -> Generator[JudgeServer]:
    server = JudgeServer(answer, faults, key=key, seconds=seconds)
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    application = Starlette(routes=[Route("/v1/chat/completions", server.complete, methods=["POST"])])
    config = uvicorn.Config(application, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    serving = uvicorn.Server(config)
    thread = Thread(target=_serve, args=(serving, [listening]), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        serving.should_exit = True
        thread.join()
        listening.close()


def _serve(serving: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    asyncio.run(serving.serve(sockets=list(sockets)))
