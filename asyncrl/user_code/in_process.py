"""Functions that only this process has, in threads: for notebooks. A thread has a deadline, but cannot be killed."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from threading import Thread
from typing import Any, Generic, TypeVar

from asyncrl.config.user_code import Agent, Called
from asyncrl.drop_reasons import DropReason
from asyncrl.observe.diagnosis.snapshot import Judging
from asyncrl.system.user_functions import find_function, is_here
from asyncrl.user_code.agents import EpisodeResult, Task
from asyncrl.user_code.failures import CallRecord
from asyncrl.user_code.harness_pool import HarnessPool
from asyncrl.user_code.pool import Pool
from asyncrl.user_code.protocol import RewardFailure, RewardStats
from asyncrl.user_code.worker import kind_of

In = TypeVar("In")
Out = TypeVar("Out")


def make_harness_pool(settings: Agent) -> "HarnessPool | HereHarnesses":
    return HereHarnesses(settings) if is_here(settings.function) else HarnessPool(settings)


def make_pool(settings: Called) -> "AnyPool":
    return HerePool(settings) if is_here(settings.function) else Pool(settings)


class HerePool(Generic[In, Out]):
    """As `Pool`, but one call at a time, here."""

    def __init__(self, settings: Called) -> None:
        self._settings = settings
        self.record = CallRecord(settings)
        self._one = asyncio.Lock()
        self.queued = 0
        self.stats = RewardStats()
        self.judging: tuple[Judging, ...] = ()
        self.failing: dict[str, int] = {}

    async def score(self, inputs: Sequence[In]) -> list[Out | RewardFailure]:
        self.queued += 1
        came = time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._one)
            finally:
                self.queued -= 1
            begun = time.monotonic()
            results: list[Any] = []
            for each in inputs:
                results.append(await self._call(each))
                self.record.add(each, results[-1])
            self.stats.add(len(inputs), came, begun, time.monotonic())
            return results

    async def _call(self, given: In) -> Any:
        return await call_here(self._settings, given)

    async def close(self) -> None: ...


class HereHarnesses:
    """As `HarnessPool`, but each episode in a thread of this process."""

    def __init__(self, settings: Agent) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.workers * settings.concurrency)
        self.playing = self.queued = 0
        self.judging: tuple[Judging, ...] = ()

    async def play(self, task: Task) -> EpisodeResult | RewardFailure:
        self.queued += 1
        try:
            await self._places.acquire()
        finally:
            self.queued -= 1
        self.playing += 1
        try:
            return await call_here(self._settings, task)
        finally:
            self.playing -= 1
            self._places.release()

    async def close(self) -> None: ...


async def call_here(settings: Called, given: Any) -> Any:
    """The function's result from a thread of this process, or why there is none in time."""
    limit_s, kind = settings.timeout_s, settings.KIND
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not result.done():  # nobody waits any longer
            result.set_result(value)

    def work() -> None:
        value = kind_of(kind).call(find_function(settings.function), given)
        with suppress(RuntimeError):  # the run is over
            loop.call_soon_threadsafe(settle, value)

    Thread(target=work, name=settings.function, daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        message = f"no result within {limit_s:g} s; it goes on in a thread: a function in a file can be killed"
        return RewardFailure(DropReason.of_function(kind, "timeout"), message)


AnyPool = Pool[Any, Any] | HerePool[Any, Any]
