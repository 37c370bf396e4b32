"""An episode that is being played: calls go to its sampler, and into its record."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from asyncrl.chat import Reply
from asyncrl.errors import ChatError, EngineError
from asyncrl.gateway.call import Answers, Call, History
from asyncrl.gateway.errors import AbortedError, CallError, NoRoomError
from asyncrl.gateway.record import Answer, Chat, EpisodeRecord, OpenCall, SampledTokens
from asyncrl.system.random_streams import random_stream
from asyncrl.types import Request, Sampling

Sampler = Callable[[Request], Awaitable[SampledTokens]]
"""Samples one request, on whichever engine plays the episode. An EngineError is an answer to the harness: the request
cannot be served at all. When it is cancelled, the sampler may return what it has with finish `abort`, to be counted."""

EMPTY_ANSWERS = 8
"""Calls that get an empty reply when all tokens are used up. A harness that does not end by then gets an error."""
NOTHING = Answer(Reply(""), "length", np.empty(0, np.int32), np.empty(0, np.float32))


class OpenEpisode:
    def __init__(
        self, name: str, chat: Chat, record: EpisodeRecord, sampler: Sampler, sampling: Sampling, seed: int
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        self.record = record
        self.history = History()
        self._name = name
        self._chat = chat
        self._sampler = sampler
        self._sampling = sampling
        self._seed = seed
        self._running: set[asyncio.Task[Answers]] = set()
        self._empty_answers = 0
        self._over = False

    async def answer(self, call: Call, *, unless: asyncio.Future[Any] | None = None) -> Answers:
        """Sample the replies. Raises CallError; cancelling it drops the call, and so does `unless` once it is done."""
        if self._over:
            raise AbortedError
        task = asyncio.create_task(self._answer(call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if unless is not None:
            unless.add_done_callback(lambda _: task.cancel())
        try:
            return await task
        except asyncio.CancelledError:
            if self._over:
                raise AbortedError from None
            raise

    def count(self, call: Call) -> int:
        """Tokens of its prompt."""
        return self.record.count(call.messages, call.tools, options=call.options)

    async def end(self) -> EpisodeRecord:
        """Answer no further calls; what is being sampled is dropped."""
        self._over = True
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)
        return self.record

    async def _answer(self, call: Call) -> Answers:
        created = time.time()
        try:
            opened = self.record.begin(call.messages, call.tools, options=call.options, n=call.n)
        except ChatError as error:
            raise CallError(400, str(error), field="messages") from None
        except NoRoomError as error:
            return self._without_room(call, error, created)
        prompt = tuple(opened[0].prompt.tolist())
        sampling = [self._sample(call, one, prompt) for one in opened]
        # One that fails must not leave the others alone.
        found = [await sampling[0]] if len(sampling) == 1 else await asyncio.gather(*sampling, return_exceptions=True)
        choices = list[Answer]()
        for each in found:
            if isinstance(each, NoRoomError):
                self._empty_answers += 1
                choices.append(NOTHING)
            elif isinstance(each, BaseException):
                raise each
            else:
                choices.append(each)
        return Answers(str(opened[0].number), created, len(prompt), choices, self._chat.decode)

    async def _sample(self, call: Call, opened: OpenCall, prompt: tuple[int, ...]) -> Answer | NoRoomError:
        room = opened.room if call.max_tokens is None else min(opened.room, call.max_tokens)
        request = Request(
            id=f"{self._name}/{opened.number}",
            tokens=prompt,
            sampling=msgspec.structs.replace(self._sampling, max_tokens=room),
            seed=random_stream(self._seed, opened.number),
            conversation=self._name,
        )
        try:
            sampled = await self._sampler(request)
        except BaseException as error:
            self.record.drop(opened)
            if isinstance(error, EngineError):
                raise CallError(400, str(error), code="engine_refused") from None
            raise
        try:
            return self.record.end(opened, sampled, call.stop, tool_calls=call.tool_calls)
        except NoRoomError as error:
            self.record.answer_empty()
            return error

    def _without_room(self, call: Call, error: NoRoomError, created: float) -> Answers:
        """As a model that has come to the end of its context: agents know that, and most end well. One that goes on all
        the same gets an error, which ends it."""
        self._empty_answers += 1
        if self._empty_answers > EMPTY_ANSWERS:
            raise error
        self.record.answer_empty(call.n)
        return Answers(
            f"none-{self._empty_answers}", created, error.prompt_tokens, [NOTHING] * call.n, self._chat.decode
        )
