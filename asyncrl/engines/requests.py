"""What every engine shares on the side of its callers: requests in, deltas out, versions in between."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from asyncrl.drafting.bandit import Range
from asyncrl.errors import EngineError
from asyncrl.types import Delta, Finish, Request, Segment


class Pending:
    """A request on its way through an engine, and what waits for its reader."""

    __slots__ = ("deltas", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.deltas: asyncio.Queue[Delta | EngineError] = asyncio.Queue()


JobT = TypeVar("JobT", bound=Pending)


class RequestSide(ABC, Generic[JobT]):
    """Implements submitting, aborting and streaming of `asyncrl.engines.base.Engine`."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self._version = version
        self._jobs: dict[str, JobT] = {}
        self._refusal = "is not started; await start() first"
        """Why nothing can be served; empty while the engine serves."""

    @property
    def refusal(self) -> str:
        return self._refusal

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that can never be served."""

    @abstractmethod
    def _begin(self, request: Request) -> JobT:
        """Take a request in."""

    @abstractmethod
    def _take_segment(self, job: JobT) -> Segment:
        """What a job sampled since its last delta."""

    @abstractmethod
    def _leave(self, job: JobT) -> None:
        """Free the place of a job, wherever it is."""

    def submit(self, request: Request) -> AsyncGenerator[Delta, None]:
        self._require_serving(f"request {request.id}")
        if request.id in self._jobs:
            raise EngineError(f"request {request.id} is already running on engine {self.name}; ids must be unique")
        if request.resumed >= len(request.tokens) or request.sampling.max_tokens <= request.resumed:
            raise EngineError(
                f"request {request.id}: {len(request.tokens)} tokens, resumed={request.resumed} and "
                f"max_tokens={request.sampling.max_tokens} leave no prompt or nothing to sample"
            )
        self._check(request)
        job = self._jobs[request.id] = self._begin(request)
        return self._stream(job)

    def learned(self) -> list[Range]:
        return []

    async def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._finish(job, "abort")

    def _require_serving(self, what: str) -> None:
        if self._refusal:
            raise EngineError(f"{what}: engine {self.name} {self._refusal}")

    def _finish(self, job: JobT, finish: Finish) -> None:
        """Deliver the last delta and free the place."""
        del self._jobs[job.request.id]
        segment = self._take_segment(job)
        self._leave(job)
        job.deltas.put_nowait(Delta(job.request.id, segment, finish))

    def _switch_version(self, version: int) -> None:
        """Close the open segment of every running answer."""
        for job in self._jobs.values():
            if len(segment := self._take_segment(job)):
                job.deltas.put_nowait(Delta(job.request.id, segment))
        self._version = version

    def _fail(self, refusal: str, cause: BaseException) -> None:
        """Tell everyone who waits, and everyone who comes, that the engine is broken."""
        self._refusal = refusal
        for job in self._jobs.values():
            failure = EngineError(f"request {job.request.id}: engine {self.name} {refusal}")
            failure.__cause__ = cause
            job.deltas.put_nowait(failure)
        self._jobs.clear()

    async def _stream(self, job: JobT) -> AsyncGenerator[Delta, None]:
        try:
            finished = False
            while not finished:
                item = await job.deltas.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                finished = item.finish is not None
        finally:  # a consumer that goes away must not keep a place
            if self._jobs.get(job.request.id) is job:
                self._finish(job, "abort")
