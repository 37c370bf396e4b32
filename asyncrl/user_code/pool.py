"""Functions of the user's in processes of their own, which can be killed: rewards, environments, stages.

A worker judges one sample at a time, under the deadline; the others of its share wait in its pipe. When it hangs or
dies, the sample it was at gets a RewardFailure and the rest of the share goes to its replacement.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.config.user_code import Agent, Called, Reward
from asyncrl.drop_reasons import DropReason, Failure
from asyncrl.errors import ConfigError
from asyncrl.observe.diagnosis.snapshot import Judging
from asyncrl.system import processes
from asyncrl.system.user_functions import is_here, load_function
from asyncrl.user_code.failures import CallRecord
from asyncrl.user_code.protocol import ALLOW_UNSAFE_EXEC, REWARD_MODEL, RewardFailure, RewardInput, RewardStats
from asyncrl.user_code.score import Score
from asyncrl.user_code.worker import HEADER, kind_of

# A worker process, seen from its parent.

END_S = 10.0
LEAVE_S = 2.0
"""For a worker to end itself, which it does at once unless it hangs."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Nothing else of our environment reaches the user's code: it often holds tokens and keys."""


class Child:
    """A running worker process and its results, which are of the type that its kind of function has."""

    def __init__(self, process: asyncio.subprocess.Process, kind: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(kind_of(kind).output | None | RewardFailure)

    @classmethod
    async def launch(cls, settings: Called) -> "Child":
        words, environment = command(settings)
        pipe = asyncio.subprocess.PIPE
        # A session of its own is also a process group of its own, and uvloop, which Ray uses, knows no other way.
        process = await asyncio.create_subprocess_exec(
            *words, env=environment, stdin=pipe, stdout=pipe, start_new_session=True
        )
        return cls(process, settings.KIND)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, inputs: Sequence[object]) -> None:
        # Not drained: a child that waits for us to read its results would make both wait.
        payloads = [msgspec.msgpack.encode(sample) for sample in inputs]
        self._stdin.write(b"".join(HEADER.pack(len(payload)) + payload for payload in payloads))

    async def receive(self, limit_s: float | None) -> Any:
        # The second look is for an event loop that was itself held up past the deadline: what has arrived counts.
        with suppress(TimeoutError):
            return await self._receive(limit_s)
        return await self._receive(0.0)

    async def _receive(self, limit_s: float | None) -> Any:
        async with asyncio.timeout(limit_s):
            while (payload := self._frames.take()) is None:
                received = await self._stdout.read(1 << 16)
                if not received:
                    raise EOFError
                self._frames.buffer += received
        return self._decoder.decode(payload)

    async def fate(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it closed its output"

    async def leave(self) -> None:
        """Let it end itself with all that it has started, in whatever groups; kill it if it does not."""
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the whole group: the function may have started processes of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()


class Frames:
    """Bytes from a worker, cut into results."""

    def __init__(self, received: bytes = b"") -> None:
        self.buffer = bytearray(received)

    def take(self) -> bytes | None:
        """The first complete result, if there is one."""
        if len(self.buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
        if len(self.buffer) < end:
            return None
        payload = memoryview(self.buffer)[HEADER.size : end].tobytes()
        del self.buffer[:end]
        return payload


def imported(received: bytes) -> RewardFailure | None:
    """A worker's first message: whether it could import the function; EOFError if there is none."""
    if (payload := Frames(received).take()) is None:
        raise EOFError
    return msgspec.msgpack.decode(payload, type=RewardFailure | None)


def command(settings: Called) -> tuple[list[str], dict[str, str]]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # The child finds modules exactly where we do.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["PYTHONUNBUFFERED"] = "1"  # what it prints is seen even if it is killed
    if isinstance(settings, Reward) and settings.allow_unsafe_exec:
        environment[ALLOW_UNSAFE_EXEC] = "1"
    if isinstance(settings, Reward) and settings.model:
        environment[REWARD_MODEL] = f"{settings.model_device}|{Path(settings.model).expanduser()}"
    if isinstance(settings, Agent):
        return [
            sys.executable,
            "-m",
            "asyncrl.user_code.harness_worker",
            settings.function,
            *settings.command,
        ], environment
    return [sys.executable, "-m", "asyncrl.user_code.worker", settings.KIND, settings.function], environment


In = TypeVar("In")
Out = TypeVar("Out")
START_S = 60.0
"""Importing the user's module may load large libraries."""
SHARE = 64
"""Most samples sent to one worker at once."""


def check_function(settings: Called) -> None:
    """Raise ConfigError unless a worker can import the function."""
    if is_here(settings.function):
        load_function(settings.function, settings.field)
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
        self.record = CallRecord(settings)
        self._workers = [_Worker(settings, self.record) for _ in range(settings.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self.queued = 0
        """Shares that wait for a worker."""
        self.stats = RewardStats()

    @property
    def judging(self) -> tuple[Judging, ...]:
        """Workers that owe a result, the oldest first."""
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

    def __init__(self, settings: Called, record: CallRecord) -> None:
        self._settings, self._record = settings, record
        self._child: Child | None = None
        self._closed = False
        self._owed: tuple[int, float, float] | None = None
        """Process, beginning and limit of the result that is waited for."""
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
            if len(results) < len(inputs):  # cancelled: nobody waits for the results to come
                await self._end()
        return results

    async def _attempt(self, inputs: Sequence[Any]) -> list[Any]:
        """Results up to the first sample that costs us the child."""
        child = await self._ready()
        if isinstance(child, RewardFailure):
            for given in inputs:
                self._remember(given, child)
            return [child] * len(inputs)
        child.send(inputs)
        results: list[Any] = []
        for given in inputs:
            results.append(await self._next(child, self._settings.timeout_s))
            self._remember(given, results[-1])
            if self._child is not child:
                break
        return results

    def _remember(self, given: object, result: object) -> None:
        if not self._closed:  # a call that was ended by us has not failed
            self._record.add(given, result)

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
        """The next result; if none comes, the child is ended and the failure is the result."""
        self._owed = child.pid, time.monotonic(), limit_s
        try:
            return await child.receive(limit_s)
        except TimeoutError:
            failure = self._failure("timeout", f"no result within {limit_s:g} s; the function was killed")
        except EOFError:
            failure = self._failure("error", f"the {self._settings.KIND} process ended: {await child.fate()}")
        finally:
            self._owed = None
        await self._end()
        return failure

    def _failure(self, failure: Failure, message: str) -> RewardFailure:
        return RewardFailure(DropReason.of_function(self._settings.KIND, failure), message)

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def close(self) -> None:
        self._closed = True
        await self._end()


def _unusable(settings: Called, why: str) -> ConfigError:
    if isinstance(settings, Agent) and settings.command:
        return ConfigError(f"agent.command={list(settings.command)} cannot be used: {why}")
    return ConfigError(
        f"{settings.field}={settings.function} cannot be used: {why}; give `package.module:function` or "
        f"`path/to/file.py:function`, called as f({settings.ARGUMENTS})"
    )
