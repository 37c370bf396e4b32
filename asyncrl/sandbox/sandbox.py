"""The sandbox for model-written code: each program runs contained by bubblewrap, or uncontained after a warning."""

import marshal
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.config.task import Limits
from asyncrl.errors import SandboxError
from asyncrl.sandbox.base import ENVIRONMENT, INTERPRETER, START_S, WAY_AROUND, Input, Output
from asyncrl.sandbox.bubblewrap import Bubblewrap
from asyncrl.sandbox.pipes import memory_file, read_exactly

CHILD = Path(__file__).with_name("child.py").read_text()
COMMAND = [INTERPRETER, "-P", "-s", "-S", "-X", "utf8", "-c", CHILD]
HEADER_BYTES = 8
MAX_WORDS = 1000
ALLOW = "allow user namespaces (`sysctl -w user.max_user_namespaces=10000`; for a container `docker run --privileged`)"
WARNING = (
    "asyncrl: WARNING: reward.allow_unsafe_exec=true: code written by the model runs as you, with your files, your "
    "network and your keys; only its time and its memory are limited"
)


class Sandbox:
    """Runs each program in a sandbox of its own, made for it and gone after it."""

    def __init__(self, *, allow_unsafe: bool = False) -> None:
        """Raise SandboxError unless a program can be contained here: one is run to see."""
        if allow_unsafe:
            print(WARNING, file=sys.stderr, flush=True)
        self._launcher = Uncontained() if allow_unsafe else Bubblewrap()
        outputs = list(self.run("print(6 * 7)", [Input()], Limits()))
        if outputs != [Output(0, b"42\n")]:
            raise SandboxError(f"the sandbox cannot be used: 6 * 7 in it gave {outputs}")

    def run(self, program: str, inputs: Sequence[Input], limits: Limits) -> Generator[Output]:
        """An output for each input, as they come; fewer when the program ran out of time or ended the sandbox.

        Closing the generator kills the program, so whoever has seen enough need not wait for the rest.
        """
        uses = [(use.stdin, use.args, use.call) for use in inputs]
        job = marshal.dumps((program, uses, msgspec.structs.asdict(limits)))
        with (
            memory_file(job) as stdin,
            memory_file() as stderr,
            self._launcher.started(COMMAND, limits, stdin, stderr) as stdout,
        ):
            if read_exactly(stdout, 1, time.monotonic() + START_S) is None:
                raise _refusal(stderr)
            deadline = time.monotonic() + limits.wall_s
            for _ in inputs:
                if (output := _receive(stdout, deadline, limits.output_bytes)) is None:
                    break
                yield output


class Uncontained:
    """Limits of time and memory, and nothing else: the program can do all that its user can."""

    @contextmanager
    def started(self, command: list[str], limits: Limits, stdin: int, stderr: int) -> Generator[int]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            process = subprocess.Popen(
                command,
                cwd=home,
                env=ENVIRONMENT,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            with process:
                assert process.stdout is not None
                try:
                    yield process.stdout.fileno()
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def _receive(stdout: int, deadline: float, most: int) -> Output | None:
    header = read_exactly(stdout, HEADER_BYTES, deadline)
    if header is None:
        return None
    size = int.from_bytes(header[4:], "little")
    if size > most:
        return None
    data = read_exactly(stdout, size, deadline)
    return None if data is None else Output(int.from_bytes(header[:4], "little", signed=True), data)


def _refusal(stderr: int) -> SandboxError:
    words = os.pread(stderr, MAX_WORDS, 0).decode(errors="replace").strip().replace("\n", "; ")
    why = words or "the interpreter in it did not answer"
    return SandboxError(f"no sandbox for the model's code can be made here ({why}): {ALLOW}, {WAY_AROUND}")
