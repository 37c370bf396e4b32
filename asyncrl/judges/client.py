"""Calls of a judge over HTTP: one request, one outcome, whatever the server does."""

import asyncio
import os
import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from asyncrl.config.judge import Judge
from asyncrl.drop_reasons import DropReason
from asyncrl.errors import ConfigError
from asyncrl.system.optional import require

HOPELESS = frozenset((400, 401, 402, 403, 404, 405, 406, 410, 411, 413, 414, 415, 422))
"""Answers that the same request gets again."""
NO_QUOTA = "insufficient_quota"
"""OpenAI's 429 for an account that is used up: no wait helps."""
LARGEST = 8 << 20
"""Bytes of an answer that are taken."""
SHOWN = 300
"""Characters of an answer that are told."""


class Reply(msgspec.Struct, frozen=True):
    """What the judge wrote."""

    text: str
    prompt_tokens: int
    reply_tokens: int


class CallFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A call that gave no text."""

    reason: DropReason
    message: str
    hopeless: bool = False
    """The next call would fail in the same way."""
    wait_s: float | None = None
    """The server wants to be left alone: for so long, or 0 for some time. That is no failure."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Message(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    message: Message


class Completion(msgspec.Struct, frozen=True):
    """Of OpenAI's chat completion, what is read."""

    choices: list[Choice]
    usage: Usage | None = None


_completion = msgspec.json.Decoder(Completion)


def read_key(settings: Judge) -> str:
    """From the environment of this process; ConfigError if it is not there."""
    name = settings.api_key_env
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if re.fullmatch(r"[!-~]+", key):
        return key
    if key:
        raise ConfigError(f"reward.judge.api_key_env={name} holds spaces or letters that no key has: export it again")
    raise ConfigError(
        f"reward.judge.api_key_env={name} is not set in this environment: export {name}=... before the run (and before "
        "`ray start`, where Ray runs already), or leave it out for a server without keys"
    )


class Client:
    """Connections to one server. Whatever it tells of an answer, the key is not in it."""

    def __init__(self, settings: Judge) -> None:
        """ConfigError without the key, MissingDependencyError without the HTTP library."""
        self._settings = settings
        self._key = read_key(settings)
        self._library = library = require("httpx2", extra="judge")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        limits = library.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        self._http = library.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def call(self, request: dict[str, Any], limit_s: float) -> Reply | CallFailed:
        content = msgspec.json.encode(request)
        try:
            async with asyncio.timeout(limit_s):
                async with self._http.stream("POST", self._settings.address, content=content) as answer:
                    received = await _bounded(answer)
        except TimeoutError:
            return CallFailed(reason=DropReason.JUDGE_TIMEOUT, message=f"no answer within {limit_s:.3g} s")
        except self._library.HTTPError as error:
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return CallFailed(reason=DropReason.JUDGE_ERROR, message=f"no answer: {self._without_key(words)}")
        if received is None:
            message = f"answered with more than {LARGEST >> 20} MiB"
            return CallFailed(reason=DropReason.JUDGE_INVALID, message=message)
        if answer.status_code == 200:
            return self._read(received, len(content))
        return self._refused(answer, received.decode(errors="replace"))

    def _read(self, content: bytes, asked: int) -> Reply | CallFailed:
        try:
            found = _completion.decode(content)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            said = self._shown(content.decode(errors="replace"))
            return CallFailed(reason=DropReason.JUDGE_INVALID, message=f"answered no chat completion ({error}): {said}")
        text = (found.choices[0].message.content if found.choices else None) or ""
        usage = found.usage or Usage()
        prompt, reply = usage.prompt_tokens, usage.completion_tokens
        return Reply(text, asked // 4 if prompt is None else prompt, -(-len(text) // 4) if reply is None else reply)

    def _refused(self, answer: Any, text: str) -> CallFailed:
        status = int(answer.status_code)
        message = f"answered {status} {answer.reason_phrase}".rstrip() + (f": {self._shown(text)}" if text else "")
        hopeless = status in HOPELESS or 300 <= status < 400 or (status == 429 and NO_QUOTA in text)
        asked = retry_after(answer.headers.get("retry-after", ""))
        wait_s = asked if asked is not None else (0.0 if status == 429 else None)
        return CallFailed(
            reason=DropReason.JUDGE_ERROR, message=message, hopeless=hopeless, wait_s=None if hopeless else wait_s
        )

    def _shown(self, text: str) -> str:
        return self._without_key(" ".join(text.split()))[:SHOWN]

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    async def close(self) -> None:
        await self._http.aclose()


async def _bounded(answer: Any) -> bytes | None:
    """What the server sends; None where it is too much to be a reply."""
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > LARGEST:
            return None
    return bytes(body)


def retry_after(header: str) -> float | None:
    """Seconds; None where the header is missing or unreadable."""
    if re.fullmatch(r"\d+(\.\d+)?", header.strip()):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
