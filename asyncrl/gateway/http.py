"""The gateway's HTTP.

    POST /e/EPISODE/v1/chat/completions         OpenAI
    POST /e/EPISODE/v1/responses
    POST /e/EPISODE/v1/messages                 Anthropic
    POST /e/EPISODE/v1/messages/count_tokens
    GET  /e/EPISODE/v1/models, /v1/models/NAME  both

The key is asked for before anything else. A reply is sent when it is sampled, a stream too: tokens of a policy version
that has not passed its probe must not leave.
"""

import asyncio
import re
import socket
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncrl.gateway.apis.chat_completions import ChatCompletion
from asyncrl.gateway.apis.messages import Messages, Prompt
from asyncrl.gateway.apis.responses import Responses
from asyncrl.gateway.call import Answers, ApiRequest
from asyncrl.gateway.episode import OpenEpisode
from asyncrl.gateway.errors import CallError

if TYPE_CHECKING:
    from asyncrl.gateway.server import GatewayServer

MAX_BODY = 64 << 20
"""Bytes of a request."""
MODEL = "policy"
"""The name that is listed; any other is accepted."""
IDLE_S = 3600
"""A connection is kept so long: tools take their time, and a client that reuses one just closed sees an error."""
CLOSE_S = 2
"""For the last answers to be sent."""
PATH = re.compile(r"/e/([^/]+)/v1/(.+)")
AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
"""Where msgspec says that an error is."""

T = TypeVar("T")

_COUNT = msgspec.json.Decoder(Prompt)
_CALLS: Mapping[str, msgspec.json.Decoder[ApiRequest]] = {
    "chat/completions": msgspec.json.Decoder(ChatCompletion),
    "responses": msgspec.json.Decoder(Responses),
    "messages": msgspec.json.Decoder(Messages),
}
_OPENAI_ERRORS = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}
_ANTHROPIC_ERRORS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "api_error",
}  # fmt: skip


class _Server(uvicorn.Server):
    """Signals are for the actor around it."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    def __init__(self, gateway: "GatewayServer", host: str) -> None:
        self._gateway = gateway
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With its protocol named, asyncio turns Nagle's algorithm off, which delays each answer by 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind((host, 0))
        port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self._serve,
            http="h11",  # bounds the head of a request, which needs no key; httptools takes 0.2 ms less and does not
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name, path = place(request.url.path)
        anthropic = path.startswith("messages") or "anthropic-version" in request.headers
        try:
            episode = self._gateway.authorised(name, _key(request))
            response = await _answer(request, episode, path)
        except ClientDisconnect:
            return
        except CallError as error:
            response = _failure(error, anthropic=anthropic)
        except Exception as error:
            traceback.print_exc()
            response = _failure(CallError(500, f"the gateway failed: {error!r}"), anthropic=anthropic)
        await response(scope, receive, send)


def place(path: str) -> tuple[str, str]:
    """The episode and what is asked of it; both empty where there is nothing. Before the key is looked at, so it costs
    no more than the path is long."""
    found = PATH.fullmatch(path.rstrip("/"))
    return (found[1], found[2]) if found else ("", "")


def _key(request: Request) -> str:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


async def _answer(request: Request, episode: OpenEpisode, path: str) -> Response:
    if path in _CALLS and request.method == "POST":
        asked = _decode(_CALLS[path], await _body(request))
        answers = await _while_connected(request, episode, asked)
        if asked.stream:
            events = b"".join(event.encode() for event in asked.events(answers, episode.history))
            return Response(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        return _json(asked.response(answers, episode.history))
    if path == "messages/count_tokens" and request.method == "POST":
        prompt = _decode(_COUNT, await _body(request)).call(episode.history)
        return _json({"input_tokens": episode.count(prompt)})
    if path == "models" and request.method == "GET":
        model = _model(MODEL)
        return _json(
            {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
        )
    if path.startswith("models/") and request.method == "GET":
        return _json(_model(path.removeprefix("models/")))
    raise CallError(404, f"{request.method} {request.url.path} does not exist here", code="not_found")


async def _while_connected(request: Request, episode: OpenEpisode, asked: ApiRequest) -> Answers:
    """The answers; a client that goes away cancels its call."""
    leaving = asyncio.ensure_future(request.receive())  # the body is read, so nothing else comes
    try:
        return await episode.answer(asked.call(episode.history), unless=leaving)
    except asyncio.CancelledError:
        if leaving.done():
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()


async def _body(request: Request) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > 4 * MAX_BODY:
            break  # whoever sends this reads no answer
    if size > MAX_BODY:
        raise CallError(413, f"the request is larger than {MAX_BODY} bytes", code="request_too_large")
    return b"".join(parts)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        place = AT.search(message)
        missing = re.search(r"required field `(\w+)`", message)
        field = ".".join(filter(None, (place[1] if place else "", missing[1] if missing else "")))
        message = AT.sub("", message)
        raise CallError(400, f"{field}: {message}" if field else message, field=field, code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(400, f"the body is no JSON: {error}", code="invalid_json") from None


def _model(name: str) -> dict[str, Any]:
    """In the form of both APIs."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _json(value: Any, status: int = 200) -> Response:
    headers = None if status == HTTPStatus.OK else {"x-should-retry": "false"}
    return Response(msgspec.json.encode(value), status, media_type="application/json", headers=headers)


def _failure(error: CallError, *, anthropic: bool) -> Response:
    """Clients must not try again: what is refused now is refused later."""
    if anthropic:
        kind = _ANTHROPIC_ERRORS.get(error.status, "invalid_request_error")
        return _json({"type": "error", "error": {"type": kind, "message": error.message}}, error.status)
    kind = _OPENAI_ERRORS.get(error.status, "invalid_request_error")
    told = {"message": error.message, "type": kind, "param": error.field or None, "code": error.code or None}
    return _json({"error": told}, error.status)
