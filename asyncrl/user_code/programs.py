"""Programs as harnesses: a process for each episode, in a group of its own that ends with the episode."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from shutil import which
from tempfile import TemporaryFile

import msgspec

from asyncrl.user_code.agents import MAX_RESULT, Access, failure
from asyncrl.user_code.protocol import RewardFailure

CHUNK = 1 << 16
MAX_COMPLAINT = 2000
"""Bytes at the end of a program's stderr among which is why it failed."""
LINGER_S = 1.0
"""A daemon that it left behind may hold its stderr open, and nobody waits for that."""


class Program:
    """A command that is called like an async harness."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._groups: set[int] = set()

    async def __call__(self, prompt: str, answer: str, access: Access) -> str | RewardFailure:
        """What it prints, or how it ended if it did not succeed."""
        # Pipes of asyncio's own would make `wait` wait for all who have inherited them.
        with TemporaryFile() as given:
            given.write(_line(prompt, answer, access))
            given.seek(0)
            (reader, writer), (error_reader, error_writer) = os.pipe(), os.pipe()
            printed = asyncio.create_task(_read(reader))
            complaints = asyncio.create_task(_pass_on(error_reader))
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=os.environ | variables(access),
                    stdin=given,
                    stdout=writer,
                    stderr=error_writer,
                    start_new_session=True,
                )
            except OSError as error:
                return failure(f"it could not be started: {error}")
            finally:
                os.close(writer)
                os.close(error_writer)
        self._groups.add(process.pid)
        try:
            code = await process.wait()
            _end(process.pid)  # with all that it has left behind, so that nothing holds its output open
            said = await printed
            await asyncio.wait([complaints], timeout=LINGER_S)
        finally:
            _end(process.pid)
            self._groups.discard(process.pid)
            printed.cancel()
            complaints.cancel()
        if code:
            ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            why = _last_line(complaints.result()) if complaints.done() and not complaints.cancelled() else ""
            return failure(": ".join(filter(None, (ended, why))))
        return said.decode(errors="replace").rstrip("\n")

    def found(self) -> "Program | RewardFailure":
        """Itself, if there is such a program."""
        return self if which(self._command[0]) else failure(f"there is no program {self._command[0]!r} on the PATH")

    def kill_all(self) -> None:
        for group in self._groups.copy():
            _end(group)


def variables(access: Access) -> dict[str, str]:
    """What the official clients read."""
    return {
        "OPENAI_BASE_URL": access.url,
        "OPENAI_API_KEY": access.key,
        "ANTHROPIC_BASE_URL": access.anthropic_url,
        "ANTHROPIC_API_KEY": access.key,
    }


def _line(prompt: str, answer: str, access: Access) -> bytes:
    said = {"prompt": prompt, "answer": answer, "url": access.url, "anthropic_url": access.anthropic_url}
    return msgspec.json.encode({**said, "key": access.key, "model": access.model}) + b"\n"


async def _read(pipe: int) -> bytes:
    """The first of what is printed; the rest is read as well, so that nobody waits for us."""
    said = bytearray()
    async with aclosing(_chunks(pipe)) as chunks:
        async for chunk in chunks:
            if len(said) < MAX_RESULT:
                said += chunk
    return bytes(said[:MAX_RESULT])


async def _pass_on(pipe: int) -> bytes:
    """To our own stderr; returns the last of it."""
    said = b""
    async with aclosing(_chunks(pipe)) as chunks:
        async for chunk in chunks:
            os.write(sys.stderr.fileno(), chunk)
            said = (said + chunk)[-MAX_COMPLAINT:]
    return said


async def _chunks(pipe: int) -> AsyncGenerator[bytes, None]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb"))
    try:
        while chunk := await reader.read(CHUNK):
            yield chunk
    finally:
        transport.close()


def _last_line(said: bytes) -> str:
    """Of a Python traceback it is the exception."""
    return next((line.strip() for line in reversed(said.decode(errors="replace").splitlines()) if line.strip()), "")


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
