"""Functions of the user's in processes of their own, which can be killed: rewards, environments, stages.

A worker judges one sample at a time, under the deadline; the others of its share wait in its pipe. When it hangs or
dies, the sample it was at gets a RewardFailure and the rest of the share goes to its replacement.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any, Generic, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.functions import is_here, load_function
from asyncrl.rewards.base import RewardFailure, RewardInput, RewardStats
from asyncrl.rewards.child import Child, command, imported
from asyncrl.rewards.score import Score
from asyncrl.rewards.settings import Called
from asyncrl.stalls import processes
from asyncrl.stalls.picture import Judging

In = TypeVar("In")
Out = TypeVar("Out")
START_S = 60.0
"""Importing the user's module may load large libraries."""
SHARE = 64
"""Most samples sent to one worker at once."""


def check_function(settings: Called) -> None:
    """Raise ConfigError unless a worker can import the function."""
    if is_here(settings.function):
        load_function(settings.function, f"{settings.KIND}.function")
        return
    try:
        received, code = _imports(settings)
    except subprocess.TimeoutExpired:
        raise _unusable(settings, f"importing it took more than {START_S:g} s") from None
    try:
        failure = imported(received)
    except EOFError:
        raise _unusable(settings, f"importing it ended the process with code {code}") from None
    if failure is not None:
        raise _unusable(settings, failure.message)


def _imports(settings: Called) -> tuple[bytes, int]:
    """What a worker says that gets no requests, and its exit code."""
    words, environment = command(settings)
    # In a session of its own, as every worker: what the function starts or ends is in no group of ours.
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as worker:
        try:
            received, _ = worker.communicate(timeout=START_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            raise
        return received, worker.returncode


class Pool(Generic[In, Out]):
    """Calls a function in `settings.workers` child processes."""

    def __init__(self, settings: Called) -> None:
        self._workers = [_Worker(settings) for _ in range(settings.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self.queued = 0
        """Shares that wait for a worker."""
        self.stats = RewardStats()

    @property
    def judging(self) -> tuple[Judging, ...]:
        """Workers that owe an answer, the oldest first."""
        owed = [judging for worker in self._workers if (judging := worker.judging) is not None]
        return tuple(sorted(owed, key=lambda judging: -judging.seconds))

    @property
    def failing(self) -> dict[str, int]:
        """Samples without a reward whose share is still being judged, by reason: nobody else knows of them yet."""
        judged = (result for worker in self._workers for result in worker.judged.copy())
        return dict(Counter(result.reason for result in judged if isinstance(result, RewardFailure)))

    async def score(self, inputs: Sequence[In]) -> list[Out | RewardFailure]:
        """One result per input, in order. Calls may overlap."""
        share = min(SHARE, ceil(len(inputs) / len(self._workers))) or 1
        async with asyncio.TaskGroup() as tasks:
            shares = [
                tasks.create_task(self._score_share(inputs[begin : begin + share]))
                for begin in range(0, len(inputs), share)
            ]
        return [result for task in shares for result in task.result()]

    async def _score_share(self, inputs: Sequence[In]) -> list[Any]:
        self.queued += 1
        came = time.monotonic()
        try:
            worker = await self._idle.get()
        finally:
            self.queued -= 1
        begun = time.monotonic()
        try:
            return await worker.score(inputs)
        finally:
            self.stats.add(len(inputs), came, begun, time.monotonic())
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End the workers; samples still under way fail. Idempotent."""
        await asyncio.gather(*(worker.close() for worker in self._workers))


class RewardPool(Pool[RewardInput, float | Score]):
    """Scores samples."""


class _Worker:
    """One child process at a time, started when there is none."""

    def __init__(self, settings: Called) -> None:
        self._settings = settings
        self._child: Child | None = None
        self._closed = False
        self._owed: tuple[int, float, float] | None = None
        """Process, beginning and limit of the answer that is waited for."""
        self.judged: list[Any] = []
        """Of the share at hand."""

    @property
    def judging(self) -> Judging | None:
        if (owed := self._owed) is None:
            return None
        pid, since, limit_s = owed
        return Judging(pid, time.monotonic() - since, limit_s, stopped=processes.state(pid) == "stopped")

    async def score(self, inputs: Sequence[Any]) -> list[Any]:
        self.judged = results = []
        try:
            while len(results) < len(inputs):
                results += await self._attempt(inputs[len(results) :])
        finally:
            self.judged = []
            if len(results) < len(inputs):  # cancelled: the answers to come belong to nobody
                await self._end()
        return results

    async def _attempt(self, inputs: Sequence[Any]) -> list[Any]:
        """Results up to the first sample that costs us the child."""
        child = await self._ready()
        if isinstance(child, RewardFailure):
            return [child] * len(inputs)
        child.send(inputs)
        results: list[Any] = []
        for _ in inputs:
            results.append(await self._next(child, self._settings.timeout_s))
            if self._child is not child:
                break
        return results

    async def _ready(self) -> Child | RewardFailure:
        """A child that has imported the function."""
        if self._child is not None and not self._child.alive:  # it died in between: no sample is to blame
            await self._end()
        if self._child is not None:
            return self._child
        if self._closed:
            return self._failure("error", f"the {self._settings.KIND} pool was closed")
        self._child = child = await Child.launch(self._settings)
        if self._closed:
            await self._end()
            return self._failure("error", f"the {self._settings.KIND} pool was closed")
        hello = await self._next(child, START_S)
        if isinstance(hello, RewardFailure):
            await self._end()
            return self._failure("error", f"the function cannot be imported: {hello.message}")
        return child

    async def _next(self, child: Child, limit_s: float) -> Any:
        """The next answer; if none comes, the child is ended and the reason is the answer."""
        self._owed = child.pid, time.monotonic(), limit_s
        try:
            return await child.receive(limit_s)
        except TimeoutError:
            failure = self._failure("timeout", f"no answer within {limit_s:g} s; the function was killed")
        except EOFError:
            failure = self._failure("error", f"the {self._settings.KIND} process ended: {await child.fate()}")
        finally:
            self._owed = None
        await self._end()
        return failure

    def _failure(self, what: str, message: str) -> RewardFailure:
        return RewardFailure(f"{self._settings.KIND}_{what}", message)

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def close(self) -> None:
        self._closed = True
        await self._end()


CALLED_AS = {"reward": "prompt, completion, answer", "environment": "prompt, turns, answer", "stage": "samples"}


def _unusable(settings: Called, why: str) -> ConfigError:
    field = "stages" if settings.KIND == "stage" else f"{settings.KIND}.function"
    return ConfigError(
        f"{field}={settings.function} cannot be used: {why}; give `package.module:function` or "
        f"`path/to/file.py:function`, called as f({CALLED_AS[settings.KIND]})"
    )
