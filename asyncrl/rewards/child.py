"""A worker process, seen from its parent."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.rewards.base import ALLOW_UNSAFE_EXEC, RewardFailure
from asyncrl.rewards.settings import Called, Reward
from asyncrl.rewards.worker import HEADER, kind_of

END_S = 10.0
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Nothing else of our environment reaches the user's code: it often holds tokens and keys."""


class Child:
    """A running worker process and its answers, which are of the type that its kind of function has."""

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
        # Not drained: a child that waits for us to read its answers would make both wait.
        payloads = [msgspec.msgpack.encode(sample) for sample in inputs]
        self._stdin.write(b"".join(HEADER.pack(len(payload)) + payload for payload in payloads))

    async def receive(self, limit_s: float) -> Any:
        # The second look is for an event loop that was itself held up past the deadline: what has arrived counts.
        with suppress(TimeoutError):
            return await self._receive(limit_s)
        return await self._receive(0.0)

    async def _receive(self, limit_s: float) -> Any:
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

    async def kill(self) -> None:
        """End the whole group: the function may have started processes of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()


class Frames:
    """Bytes from a worker, cut into answers."""

    def __init__(self, received: bytes = b"") -> None:
        self.buffer = bytearray(received)

    def take(self) -> bytes | None:
        """The first complete answer, if there is one."""
        if len(self.buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
        if len(self.buffer) < end:
            return None
        payload = memoryview(self.buffer)[HEADER.size : end].tobytes()
        del self.buffer[:end]
        return payload


def imported(received: bytes) -> RewardFailure | None:
    """A worker's first answer: whether it could import the function; EOFError if there is none."""
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
    return [sys.executable, "-m", "asyncrl.rewards.worker", settings.KIND, settings.function], environment
