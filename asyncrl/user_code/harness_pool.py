"""Harnesses of the user's in processes of their own, many episodes at a time in each.

play -> the worker with the fewest episodes -> its result, or a failure: error, timeout, invalid
          |
          a worker that dies fails its episodes; the next one starts it again
          an episode past its time is cancelled. A thread cannot be: its worker gets no episode any more, another
          takes its place, and it is killed when its last episode in time has ended. One whose event loop does not
          even hear of the cancellation is killed at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from asyncrl.config.user_code import Agent
from asyncrl.drop_reasons import DropReason
from asyncrl.observe.diagnosis.snapshot import Judging
from asyncrl.system import processes
from asyncrl.user_code.agents import EpisodeResult, Task, failure
from asyncrl.user_code.pool import END_S, START_S, Child
from asyncrl.user_code.protocol import RewardFailure

CANCEL_S = 5.0
"""For an episode to end that was cancelled."""
SHOWN = 8
"""Episodes that a diagnosis names."""
Result = EpisodeResult | RewardFailure


class HarnessPool:
    """Plays episodes in `settings.workers` child processes."""

    def __init__(self, settings: Agent) -> None:
        self._settings = settings
        self._workers = [self._worker() for _ in range(settings.workers)]
        self._retired: set[_Worker] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _worker(self) -> "_Worker":
        return _Worker(self._settings, self._wake, self._retire)

    @property
    def playing(self) -> int:
        return sum(len(worker.episodes) for worker in (*self._workers, *self._retired))

    @property
    def queued(self) -> int:
        """Episodes that wait for a worker."""
        return sum(not place.done() for place in self._waiting.copy())

    @property
    def judging(self) -> tuple[Judging, ...]:
        """The oldest of the episodes that are played."""
        now = time.monotonic()
        open_now = [each for worker in (*self._workers, *self._retired) for each in worker.episodes.copy().values()]
        oldest = sorted((each for each in open_now if each.child is not None), key=lambda each: each.since)[:SHOWN]
        return tuple(_judging(each, now, self._settings.timeout_s) for each in oldest)

    async def play(self, task: Task) -> Result:
        """Its result, or why there is none; cancelled, it is ended in its worker as well."""
        while len((worker := self._least()).episodes) >= self._settings.concurrency:
            await self._free_place()
        return await worker.play(task)

    def _least(self) -> "_Worker":
        return min(self._workers, key=lambda worker: len(worker.episodes))

    async def _free_place(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done():  # it was ours already
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting:
            if not (place := self._waiting.popleft()).done():
                place.set_result(None)
                return

    def _retire(self, worker: "_Worker") -> None:
        """An episode in it can be ended only with its process: let the others come to their ends first."""
        if worker in self._workers:
            self._workers[self._workers.index(worker)] = self._worker()
            self._retired.add(worker)
            worker.retire(lambda: self._retired.discard(worker))
            for _ in range(self._settings.concurrency):
                self._wake()

    async def close(self) -> None:
        """End the workers; episodes under way fail. Idempotent."""
        await asyncio.gather(*(worker.close() for worker in (*self._workers, *self._retired)))


class _Episode:
    """One that a worker has."""

    def __init__(self) -> None:
        self.over: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.child: Child | None = None
        """Set when it was sent there."""
        self.since = time.monotonic()
        self.heard = asyncio.Event()
        """Its worker has come to cancel it."""
        self.given_up = False

    def end(self, result: Result) -> None:
        if not self.over.done():
            self.over.set_result(result)


def _judging(episode: _Episode, now: float, limit_s: float) -> Judging:
    assert episode.child is not None
    pid = episode.child.pid
    return Judging(pid, now - episode.since, limit_s, stopped=processes.state(pid) == "stopped")


class _Worker:
    """One child process at a time, started when there is none."""

    def __init__(self, settings: Agent, freed: Callable[[], None], stuck: Callable[["_Worker"], None]) -> None:
        """`freed` is called at the end of each episode, `stuck` for one that cannot be ended."""
        self._settings, self._freed, self._stuck = settings, freed, stuck
        self.episodes: dict[str, _Episode] = {}
        self._starting: asyncio.Task[Child | RewardFailure] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gone: Callable[[], None] | None = None
        self._closed = False

    async def play(self, task: Task) -> Result:
        episode = self.episodes[task.episode] = _Episode()
        episode.over.add_done_callback(lambda _: self._ended(task.episode))
        try:
            child = await self._ready()
            if isinstance(child, RewardFailure):
                return child
            episode.child, episode.since = child, time.monotonic()
            child.send([task])
            async with asyncio.timeout(self._settings.timeout_s):
                return await asyncio.shield(episode.over)
        except TimeoutError:
            message = f"it had not ended after {self._settings.timeout_s:g} s"
            return RewardFailure(DropReason.AGENT_TIMEOUT, message)
        finally:
            episode.given_up = True
            if episode.child is None:
                episode.end(failure("it was not begun"))
            elif not episode.over.done():
                self._background(self._cancel(task.episode, episode, episode.child))

    async def _cancel(self, name: str, episode: _Episode, child: Child) -> None:
        child.send([name])
        await asyncio.wait([episode.over], timeout=CANCEL_S)
        if episode.over.done():
            return
        if episode.heard.is_set():
            self._stuck(self)
            self._leave_if_idle()  # if it was retired for another, and this one was in time then
        else:
            await child.leave()

    def _ended(self, name: str) -> None:
        del self.episodes[name]
        self._freed()
        self._leave_if_idle()

    def retire(self, gone: Callable[[], None]) -> None:
        """End the process when only episodes are left in it that nobody waits for."""
        self._gone = gone
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._gone is not None and all(each.given_up for each in self.episodes.values()):
            gone, self._gone = self._gone, None
            self._background(self.close()).add_done_callback(lambda _: gone())

    async def _ready(self) -> Child | RewardFailure:
        """A child that has imported the function; all who wait share one start."""
        if self._closed:
            return failure("the agent pool was closed")
        if self._starting is None:
            self._starting = self._background(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Child | RewardFailure:
        child = await Child.launch(self._settings)
        try:
            hello = await child.receive(START_S)
        except TimeoutError:
            hello = failure(f"importing it took more than {START_S:g} s")
        except EOFError:
            hello = failure(f"its process ended: {await child.fate()}")
        if isinstance(hello, RewardFailure) or self._closed:
            self._starting = None
            await child.leave()
            why = hello.message if isinstance(hello, RewardFailure) else "the agent pool was closed"
            return failure(f"the function cannot be imported: {why}")
        self._background(self._listen(child))
        return child

    async def _listen(self, child: Child) -> None:
        """To what it says, until it ends."""
        try:
            while True:
                said = await child.receive(None)
                if isinstance(said, str):
                    if said in self.episodes:
                        self.episodes[said].heard.set()
                elif said.episode in self.episodes:
                    self.episodes[said.episode].end(said.result)
        except EOFError:
            self._starting = None
        died = failure(f"the agent process ended: {await child.fate()}")
        await child.leave()
        for episode in [each for each in self.episodes.values() if each.child is child]:
            episode.end(died)

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        self._closed = True
        if (starting := self._starting) is not None:
            child = await asyncio.shield(starting)
            if not isinstance(child, RewardFailure):
                await child.leave()
        if others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=END_S)
