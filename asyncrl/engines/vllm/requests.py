"""Requests on their way through vLLM's AsyncLLM, and back: token ids in, tokens with their log-probabilities out.

Tokens of all requests are read together, when vLLM reports a step to its stat loggers. Its `generate` has a task for
each request instead; to wake them all at every step takes a seventh of this process's time, which bounds how fast large
batches of small models are decoded.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from math import isfinite
from typing import cast

from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from asyncrl.engines.requests import Pending, RequestSide
from asyncrl.engines.settings import VllmEngine as Settings
from asyncrl.engines.vllm.options import sampling_params
from asyncrl.errors import EngineError
from asyncrl.types import Finish, Request, Segment

WATCH_S = 0.2
"""Between two looks whether vLLM still lives."""
FINISH: dict[str | None, Finish] = {"stop": "stop", "length": "length"}


class _Job(Pending):
    """A request, and what vLLM sampled for it since the last delta."""

    __slots__ = ("answer", "logprobs", "sampled", "tokens")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampled = 0
        self.answer: RequestOutputCollector | None = None  # while vLLM works on it


class VllmRequests(RequestSide[_Job]):
    def __init__(self, settings: Settings, name: str, version: int) -> None:
        super().__init__(name, version)
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted = self._generated = 0

    def _serving(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"engine {self.name} {self._refusal}")
        return self._llm

    def _check(self, request: Request) -> None:
        if len(request.tokens) >= self._settings.max_length:
            raise EngineError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room for an answer within "
                f"engine.max_length={self._settings.max_length}; shorten the prompt or raise engine.max_length"
            )

    def _begin(self, request: Request) -> _Job:
        job = _Job(request)
        self._submitted += 1
        self._do(self._enter(job, f"{request.id}#{self._submitted}"))
        return job

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop alone would forget it
        task.add_done_callback(self._tasks.discard)

    async def _enter(self, job: _Job, name: str) -> None:
        # The salt keeps keys and values of other versions away from a new request.
        prompt = TokensPrompt(prompt_token_ids=list(job.request.tokens), cache_salt=f"v{self._version}")
        params = sampling_params(job.request, self._settings)
        try:
            llm = self._serving()
            answer = await llm.add_request(name, prompt, params, priority=-job.request.ahead)
        except Exception as error:  # whatever vLLM refused it for
            self._lose(job, error)
            return
        if self._jobs.get(job.request.id) is job:
            job.answer = answer
            self._read(job)  # in case that it was quick
        else:  # nobody wants it any more
            await _abort(llm, answer)

    async def _read_always(self) -> None:
        """Tokens are read behind each step; but when vLLM dies there is none."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._read_all()

    def _read_all(self) -> None:
        # Many more may wait for their first token than are decoded, so this looks before it calls anything.
        for job in [job for job in self._jobs.values() if job.answer is not None and job.answer.output is not None]:
            self._read(job)

    def _read(self, job: _Job) -> None:
        """Move what vLLM has sampled into the job."""
        try:
            if job.answer is not None and (output := cast(RequestOutput | None, job.answer.get_nowait())):
                self._take(job, output.outputs[0])
        except Exception as error:  # vLLM's own, handed over in place of tokens, or of what it reports
            self._lose(job, error)

    def _lose(self, job: _Job, error: Exception) -> None:
        """Whoever waits for a request that vLLM refused or lost must hear of it."""
        if isinstance(error, EngineDeadError):
            self._fail(f"is dead: {error}", error)
        elif self._jobs.get(job.request.id) is job:  # not another one that has its name since
            del self._jobs[job.request.id]
            self._leave(job)
            failure = EngineError(f"request {job.request.id}: {error.__cause__ or error!r}")
            failure.__cause__ = error
            job.deltas.put_nowait(failure)

    def _take(self, job: _Job, new: CompletionOutput) -> None:
        found = cast(FlatLogprobs, new.logprobs).logprobs if new.token_ids else []
        if len(found) != len(new.token_ids):
            raise EngineError(f"vLLM reports {len(found)} log-probabilities for {len(new.token_ids)} tokens")
        if not all(map(isfinite, found)):
            raise EngineError(f"vLLM reports log-probabilities that are not finite under version {self._version}")
        job.tokens += new.token_ids
        job.logprobs += found
        job.sampled += len(new.token_ids)
        self._generated += len(new.token_ids)
        if new.finish_reason is not None:
            job.answer = None
            self._finish(job, FINISH.get(new.finish_reason, "abort"))

    def _take_segment(self, job: _Job) -> Segment:
        segment = Segment.sampled(job.tokens, job.logprobs, self._version)
        job.tokens, job.logprobs = [], []
        return segment

    def _leave(self, job: _Job) -> None:
        answer, job.answer = job.answer, None
        if answer is not None:
            self._do(_abort(self._serving(), answer))


async def _abort(llm: AsyncLLM, answer: RequestOutputCollector) -> None:
    with suppress(EngineDeadError):
        await llm.abort(answer.request_id, internal=True)
