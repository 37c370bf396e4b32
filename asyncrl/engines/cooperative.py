"""What engines that run inside the caller's event loop share: rows, pausing and the step loop.

One task takes a step and yields to the loop, again and again while there is work. A step is plain synchronous code, so
updates, pauses and aborts always fall between two steps and need no locks.

What others do between two steps is mostly a chain of small things, one a turn of the loop: a probe's answer, for one,
goes from its request to its reader, from there to whoever gathers all of them, and on to who judges them. So the loop
has several turns before the next step. A turn in which nobody has anything to do costs some microseconds.
"""

import asyncio
from abc import abstractmethod
from collections import deque
from time import perf_counter

from asyncrl.engines.requests import Pending, RequestSide
from asyncrl.errors import EngineError
from asyncrl.types import Request, Segment

TURNS = 4
"""Of the event loop from one step to the next."""


async def turns() -> None:
    """Let the others go on. An engine that has work, and keeps no pace, takes a step meanwhile."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Job(Pending):
    """A request that gets a row of the running batch."""

    __slots__ = ("leader", "row")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.row = -1
        """Place in the running batch; -1 before and after."""
        self.leader: Job | None = None
        """A running job with the same prompt, whose keys and values can be copied once they are there."""


class CooperativeEngine(RequestSide[Job]):
    """A subclass says what one step does."""

    def __init__(self, name: str, version: int, pace_seconds: float = 0.0) -> None:
        super().__init__(name, version)
        self._pace_seconds = pace_seconds
        self._waiting: deque[Job] = deque()
        self._work = asyncio.Event()
        self._paused = False
        self._task: asyncio.Task[None] | None = None
        self._steps = 0
        self._busy_seconds = 0.0

    @abstractmethod
    def _open(self) -> None:
        """Load what steps need."""

    @abstractmethod
    def _step(self) -> None:
        """Admit waiting jobs, sample, and `_finish` those that are done."""

    @abstractmethod
    def _take_row(self, job: Job) -> Segment:
        """What a running job sampled since its last delta."""

    @abstractmethod
    def _release(self, job: Job) -> None:
        """Free the row of a running job."""

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

    def _begin(self, request: Request) -> Job:
        job = Job(request)
        if request.ahead:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        if not self._paused:
            self._work.set()
        return job

    def _take_segment(self, job: Job) -> Segment:
        return self._take_row(job) if job.row >= 0 else Segment.sampled((), (), self._version)

    def _leave(self, job: Job) -> None:
        if job.row < 0:
            self._waiting.remove(job)
        else:
            self._release(job)
        self._signal()

    async def _serve(self) -> None:
        due = 0.0
        while True:
            while not self._work.is_set():  # it may be cleared again between waking and running
                await self._work.wait()
            began = perf_counter()
            if began - due > self._pace_seconds:  # after a rest, or so late that it is not caught up
                due = began
            self._step()
            ended = perf_counter()
            self._busy_seconds += ended - began
            self._steps += 1
            due += self._pace_seconds
            if due > ended:
                await asyncio.sleep(due - ended)
            else:
                await turns()

    def _signal(self) -> None:
        if self._jobs and not self._paused:
            self._work.set()
        else:
            self._work.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A failed step reaches everyone who waits."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(f"failed in step {self._steps}: {error!r}", error)
            self._waiting.clear()
