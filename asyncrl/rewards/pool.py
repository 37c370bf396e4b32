"""Reward functions in processes of their own, which can be killed.

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

import msgspec

from asyncrl.config import Reward
from asyncrl.errors import ConfigError
from asyncrl.rewards.base import ALLOW_UNSAFE_EXEC, RewardFailure, RewardInput, RewardResult
from asyncrl.rewards.worker import HEADER
from asyncrl.stalls import processes
from asyncrl.stalls.picture import Judging

START_S = 60.0
"""Importing the user's module may load large libraries."""
END_S = 10.0
SHARE = 64
"""Most samples sent to one worker at once."""
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Nothing else of our environment reaches the user's code: it often holds tokens and keys."""


CLOSED = RewardFailure("reward_error", "the reward pool was closed")


def check_function(settings: Reward) -> None:
    """Raise ConfigError unless a worker can import the reward function."""
    command, environment = _command(settings)
    try:
        run = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=START_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _unusable(settings, f"importing it took more than {START_S:g} s") from None
    result = _Frames(run.stdout).take()
    if result is None:
        raise _unusable(settings, f"importing it ended the process with code {run.returncode}")
    if isinstance(result, RewardFailure):
        raise _unusable(settings, result.message)


class RewardPool:
    """Scores samples in `settings.workers` child processes."""

    def __init__(self, settings: Reward) -> None:
        self._workers = [_Worker(settings) for _ in range(settings.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self.queued = 0
        """Shares that wait for a worker."""

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

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per input, in order. Calls may overlap."""
        share = min(SHARE, ceil(len(inputs) / len(self._workers))) or 1
        async with asyncio.TaskGroup() as tasks:
            shares = [
                tasks.create_task(self._score_share(inputs[begin : begin + share]))
                for begin in range(0, len(inputs), share)
            ]
        return [result for task in shares for result in task.result()]

    async def _score_share(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        self.queued += 1
        try:
            worker = await self._idle.get()
        finally:
            self.queued -= 1
        try:
            return await worker.score(inputs)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End the workers; samples still under way fail. Idempotent."""
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _Worker:
    """One child process at a time, started when there is none."""

    def __init__(self, settings: Reward) -> None:
        self._settings = settings
        self._child: _Child | None = None
        self._closed = False
        self._owed: tuple[int, float, float] | None = None
        """Process, beginning and limit of the answer that is waited for."""
        self.judged: list[RewardResult] = []
        """Of the share at hand."""

    @property
    def judging(self) -> Judging | None:
        if (owed := self._owed) is None:
            return None
        pid, since, limit_s = owed
        return Judging(pid, time.monotonic() - since, limit_s, stopped=processes.state(pid) == "stopped")

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        self.judged = results = []
        try:
            while len(results) < len(inputs):
                results += await self._attempt(inputs[len(results) :])
        finally:
            self.judged = []
            if len(results) < len(inputs):  # cancelled: the answers to come belong to nobody
                await self._end()
        return results

    async def _attempt(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Results up to the first sample that costs us the child."""
        child = await self._ready()
        if isinstance(child, RewardFailure):
            return [child] * len(inputs)
        child.send(inputs)
        results: list[RewardResult] = []
        for _ in inputs:
            results.append(await self._next(child, self._settings.timeout_s))
            if self._child is not child:
                break
        return results

    async def _ready(self) -> "_Child | RewardFailure":
        """A child that has imported the function."""
        if self._child is not None and not self._child.alive:  # it died in between: no sample is to blame
            await self._end()
        if self._child is not None:
            return self._child
        if self._closed:
            return CLOSED
        self._child = child = await _Child.launch(self._settings)
        if self._closed:
            await self._end()
            return CLOSED
        hello = await self._next(child, START_S)
        if isinstance(hello, RewardFailure):
            await self._end()
            return RewardFailure("reward_error", f"the function cannot be imported: {hello.message}")
        return child

    async def _next(self, child: "_Child", limit_s: float) -> RewardResult:
        """The next answer; if none comes, the child is ended and the reason is the answer."""
        self._owed = child.pid, time.monotonic(), limit_s
        try:
            return await child.receive(limit_s)
        except TimeoutError:
            failure = RewardFailure("reward_timeout", f"no reward within {limit_s:g} s; the function was killed")
        except EOFError:
            failure = RewardFailure("reward_error", f"the reward process ended: {await child.fate()}")
        finally:
            self._owed = None
        await self._end()
        return failure

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def close(self) -> None:
        self._closed = True
        await self._end()


class _Child:
    """A running worker process and its frames."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._frames = _Frames()

    @classmethod
    async def launch(cls, settings: Reward) -> "_Child":
        command, environment = _command(settings)
        pipe = asyncio.subprocess.PIPE
        # A session of its own is also a process group of its own, and uvloop, which Ray uses, knows no other way.
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=pipe, stdout=pipe, start_new_session=True
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, inputs: Sequence[RewardInput]) -> None:
        # Not drained: a child that waits for us to read its answers would make both wait.
        payloads = [msgspec.msgpack.encode(sample) for sample in inputs]
        self._stdin.write(b"".join(HEADER.pack(len(payload)) + payload for payload in payloads))

    async def receive(self, limit_s: float) -> RewardResult:
        # The second look is for an event loop that was itself held up past the deadline: what has arrived counts.
        with suppress(TimeoutError):
            return await self._receive(limit_s)
        return await self._receive(0.0)

    async def _receive(self, limit_s: float) -> RewardResult:
        async with asyncio.timeout(limit_s):
            while (result := self._frames.take()) is None:
                received = await self._stdout.read(1 << 16)
                if not received:
                    raise EOFError
                self._frames.buffer += received
        return result

    async def fate(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it closed its output"

    async def kill(self) -> None:
        """End the whole group: the function may have started processes of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()


class _Frames:
    """Bytes from a worker, cut into answers."""

    _decoder = msgspec.msgpack.Decoder(RewardResult)

    def __init__(self, received: bytes = b"") -> None:
        self.buffer = bytearray(received)

    def take(self) -> RewardResult | None:
        """The first complete answer, if there is one."""
        if len(self.buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
        if len(self.buffer) < end:
            return None
        result = self._decoder.decode(memoryview(self.buffer)[HEADER.size : end].tobytes())
        del self.buffer[:end]
        return result


def _command(settings: Reward) -> tuple[list[str], dict[str, str]]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # The child finds modules exactly where we do.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["PYTHONUNBUFFERED"] = "1"  # what it prints is seen even if it is killed
    if settings.allow_unsafe_exec:
        environment[ALLOW_UNSAFE_EXEC] = "1"
    return [sys.executable, "-m", "asyncrl.rewards.worker", settings.function], environment


def _unusable(settings: Reward, why: str) -> ConfigError:
    return ConfigError(
        f"reward.function={settings.function} cannot be used: {why}; give `package.module:function` or "
        "`path/to/file.py:function`, called as f(prompt, completion, answer)"
    )
