"""What engines that run inside the caller's event loop share: requests, streams, pausing and the step loop.

One task takes a step and yields to the loop, again and again while there is work. A step is plain synchronous code, so
updates, pauses and aborts always fall between two steps and need no locks.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator
from time import perf_counter

from asyncrl.errors import EngineError
from asyncrl.types import Delta, Finish, Request, Segment


class Job:
    """A request on its way through an engine."""

    __slots__ = ("deltas", "leader", "request", "row")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.row = -1
        """Place in the running batch; -1 before and after."""
        self.leader: Job | None = None
        """A running job with the same prompt, whose keys and values can be copied once they are there."""
        self.deltas: asyncio.Queue[Delta | EngineError] = asyncio.Queue()


class CooperativeEngine(ABC):
    """Implements the request side of `asyncrl.engines.base.Engine`; a subclass says what one step does."""

    def __init__(self, name: str, version: int, pace_seconds: float = 0.0) -> None:
        self.name = name
        self._version = version
        self._pace_seconds = pace_seconds
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._work = asyncio.Event()
        self._paused = False
        self._task: asyncio.Task[None] | None = None
        self._refusal = "is not started; await start() first"
        self._steps = 0
        self._busy_seconds = 0.0

    @abstractmethod
    def _open(self) -> None:
        """Load what steps need."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise EngineError for a request that can never be served."""

    @abstractmethod
    def _step(self) -> None:
        """Admit waiting jobs, sample, and `_finish` those that are done."""

    @abstractmethod
    def _take_segment(self, job: Job) -> Segment:
        """What a running job sampled since its last delta."""

    @abstractmethod
    def _release(self, job: Job) -> None:
        """Free the place of a running job."""

    @abstractmethod
    def _shut(self) -> None:
        """Let go of memory."""

    async def start(self) -> None:
        if self._task is not None:
            raise EngineError(f"engine {self.name} was started before; make a new one")
        self._open()
        self._refusal = ""
        self._task = asyncio.create_task(self._serve(), name=f"engine-{self.name}")
        self._task.add_done_callback(self._ended)

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
        job = self._jobs[request.id] = Job(request)
        self._waiting.append(job)
        self._signal()
        return self._stream(job)

    async def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._finish(job, "abort")

    async def pause(self) -> None:
        self._paused = True
        self._signal()

    async def resume(self) -> None:
        self._paused = False
        self._signal()

    async def close(self) -> None:
        self._refusal = "is closed"
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        for job in list(self._jobs.values()):
            self._finish(job, "abort")
        self._shut()

    def _require_serving(self, what: str) -> None:
        if self._refusal:
            raise EngineError(f"{what}: engine {self.name} {self._refusal}")

    def _finish(self, job: Job, finish: Finish) -> None:
        """Deliver the last delta and free the place, wherever the job is."""
        del self._jobs[job.request.id]
        if job.row < 0:
            self._waiting.remove(job)
            segment = Segment.sampled((), (), self._version)
        else:
            segment = self._take_segment(job)
            self._release(job)
        job.deltas.put_nowait(Delta(job.request.id, segment, finish))
        self._signal()

    def _switch_version(self, version: int) -> None:
        """Close the open segment of every running answer."""
        for job in self._jobs.values():
            if job.row >= 0 and len(segment := self._take_segment(job)):
                job.deltas.put_nowait(Delta(job.request.id, segment))
        self._version = version

    async def _stream(self, job: Job) -> AsyncGenerator[Delta, None]:
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

    async def _serve(self) -> None:
        while True:
            while not self._work.is_set():  # it may be cleared again between waking and running
                await self._work.wait()
            began = perf_counter()
            self._step()
            self._busy_seconds += perf_counter() - began
            self._steps += 1
            await asyncio.sleep(self._pace_seconds)

    def _signal(self) -> None:
        if self._jobs and not self._paused:
            self._work.set()
        else:
            self._work.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A failed step reaches everyone who waits."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._refusal = f"failed in step {self._steps}: {error!r}"
        for job in self._jobs.values():
            failure = EngineError(f"request {job.request.id}: engine {self.name} {self._refusal}")
            failure.__cause__ = error
            job.deltas.put_nowait(failure)
        self._jobs.clear()
        self._waiting.clear()
