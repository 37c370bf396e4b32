"""Requests on their way through vLLM's engine process, and back: token ids in, tokens with log-probabilities out.

Tokens of all requests are read together, a step at a time. AsyncLLM's own way from there to a caller makes a handful of
objects for each token and wakes a task for each request; for 256 of them that takes longer than a GPU takes for a step.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from math import isfinite

import numpy as np
from vllm.inputs import TokensPrompt
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.config.engine import VllmEngine as Settings
from asyncrl.engines.requests import Pending, RequestSide
from asyncrl.engines.vllm.options import sampling_params
from asyncrl.errors import EngineError
from asyncrl.models.routes import Routes, RouteShape
from asyncrl.types import Finish, Request, Segment

FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


class Counters:
    """What vLLM reports about its steps, summed since the start of the engine."""

    def __init__(self) -> None:
        self.steps = self.prefilled = self.cached = self.preempted = self.drafts = self.drafted = 0
        self.accepted: list[int] = []
        """Accepted tokens by their position in the draft."""

    def count(self, step: EngineCoreOutputs) -> None:
        self.steps += bool(step.outputs)
        for output in step.outputs:
            if output.prefill_stats is not None:  # with a request's first token
                cached = output.prefill_stats.num_cached_tokens
                self.prefilled += output.prefill_stats.num_prompt_tokens - cached
                self.cached += cached
            if output.events:
                self.preempted += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)
        drafting = step.scheduler_stats.spec_decoding_stats if step.scheduler_stats is not None else None
        if drafting is not None:
            self.drafts += drafting.num_drafts
            self.drafted += drafting.num_draft_tokens
            missing = len(drafting.num_accepted_tokens_per_pos) - len(self.accepted)
            self.accepted += [0] * missing
            for position, accepted in enumerate(drafting.num_accepted_tokens_per_pos):
                self.accepted[position] += accepted


class _Job(Pending):
    """A request, and what vLLM sampled for it since the last delta."""

    __slots__ = ("logprobs", "name", "routes", "sampled", "tokens")

    def __init__(self, request: Request, name: str) -> None:
        super().__init__(request)
        self.name = name
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routes: list[Routes] = []
        """Of tokens that were fed, in all layers: the prompt's with the first sampled token."""
        self.sampled = 0


class VllmRequests(RequestSide[_Job]):
    def __init__(self, settings: Settings, name: str, version: int, routes: RouteShape | None = None) -> None:
        """`routes`: of those that vLLM returns, if it does."""
        super().__init__(name, version)
        self._settings, self._routes = settings, routes
        self._llm: AsyncLLM | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, _Job] = {}
        """What vLLM works on, by the name it has there."""
        self._counters = Counters()
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
        self._submitted += 1
        job = _Job(request, f"{request.id}#{self._submitted}")
        self._do(self._enter(job))
        return job

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop alone would forget it
        task.add_done_callback(self._tasks.discard)

    async def _enter(self, job: _Job) -> None:
        request = job.request
        try:
            llm = self._serving()
            tasks = await llm.get_supported_tasks()  # asked for once; from here on nothing waits before it is sent
            if self._jobs.get(request.id) is not job:
                return  # nobody wants it any more
            # The salt keeps keys and values of other versions away from a new request.
            prompt = TokensPrompt(prompt_token_ids=list(request.tokens), cache_salt=f"v{self._version}")
            params = sampling_params(request, self._settings)
            entering = llm.input_processor.process_inputs(job.name, prompt, params, tasks, priority=-request.ahead)
            self._running[job.name] = job
            await llm.engine_core.add_request_async(entering)
        except Exception as error:  # whatever vLLM refused it for
            self._lose(job, error)

    async def _read(self) -> None:
        """Step by step, until vLLM is dead."""
        try:
            core = self._serving().engine_core
            while True:
                self._take_step(await core.get_output_async())
        except Exception as error:  # whatever it is, nobody reads any more
            self._fail(f"is dead: {error}", error)

    def _take_step(self, step: EngineCoreOutputs) -> None:
        self._counters.count(step)
        tokens, logprobs = _sampled(step.outputs)
        end = 0
        for output in step.outputs:
            begin, end = end, end + len(output.new_token_ids)
            job = self._running.get(output.request_id)
            if job is None:
                continue  # it was cancelled
            try:
                if tokens[begin:end] != output.new_token_ids:
                    raise EngineError(f"vLLM reports log-probabilities of {tokens[begin:end]}, not of its tokens")
                self._take(job, output, logprobs[begin:end])
            except EngineError as error:
                self._lose(job, error)

    def _take(self, job: _Job, new: EngineCoreOutput, logprobs: list[float]) -> None:
        if not all(map(isfinite, logprobs)):
            raise EngineError(f"vLLM reports log-probabilities that are not finite under version {self._version}")
        if self._routes is not None and new.new_token_ids:
            if new.routed_experts is None:
                raise EngineError("vLLM returned no routes; set rollout.router_replay=off")
            job.routes.append(new.routed_experts)
        job.tokens += new.new_token_ids
        job.logprobs += logprobs
        job.sampled += len(logprobs)
        self._generated += len(logprobs)
        if new.finish_reason is not None:
            del self._running[job.name]
            self._finish(job, FINISH.get(str(new.finish_reason), "abort"))

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

    def _take_segment(self, job: _Job) -> Segment:
        routes = b"" if self._routes is None else self._routes.write(job.routes)
        segment = Segment.sampled(job.tokens, job.logprobs, self._version, routes)
        job.tokens, job.logprobs, job.routes = [], [], []
        return segment

    def _leave(self, job: _Job) -> None:
        if self._running.pop(job.name, None) is not None:
            self._do(self._abort(job.name))

    async def _abort(self, name: str) -> None:
        with suppress(EngineDeadError, EngineError):  # then it works on nothing any more
            await self._serving().engine_core.abort_requests_async([name])


def _sampled(outputs: Sequence[EngineCoreOutput]) -> tuple[list[int], list[float]]:
    """Tokens of a step and their log-probabilities, however these are spread over its outputs (scheduler.py)."""
    found = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if not found:
        return [], []
    tokens_T_1 = np.concatenate([each.logprob_token_ids for each in found])
    logprobs_T_1 = np.concatenate([each.logprobs for each in found])
    return tokens_T_1[:, 0].tolist(), logprobs_T_1[:, 0].tolist()
