"""What goes into a sandbox and what comes out. Expected outputs are not among it: judging is the caller's."""

import os
import sys
from typing import Any

import msgspec

from asyncrl.settings import AboveZero, Positive, Settings

START_S = 30.0
"""Until the interpreter inside answers. The program's own time begins then, so a busy machine costs it nothing."""
END_S = 10.0
INTERPRETER = os.path.realpath(sys.executable)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""All of it. The same program must print the same twice, also what depends on the order of a set."""

WAY_AROUND = "or give reward.allow_unsafe_exec=true, with which it can do all that you can do"


class Limits(Settings, frozen=True):
    """What one program may use. Memory and time are of each process; the wall clock and the disk are of all of them."""

    wall_s: AboveZero = 10.0
    """For all inputs of a program together; then everything in the sandbox is killed."""
    cpu_s: Positive = 2
    """Seconds of CPU for each input."""
    memory_bytes: Positive = 512 << 20
    """Address space."""
    processes: Positive = 8
    """At a time, threads included."""
    output_bytes: Positive = 1 << 20
    """What is kept of each input's output; also the size of the largest file it can write."""
    disk_bytes: Positive = 64 << 20
    """All files together; they are in memory."""


class Input(msgspec.Struct, frozen=True):
    """One use of the program: run it with this stdin and these arguments, or call a function it defines."""

    stdin: str = ""
    args: tuple[Any, ...] = ()
    """Of a program: strings. Of a function: values of JSON."""
    call: str = ""
    """`function`, or `Class.method` of an instance made without arguments; what it returns is written as JSON."""


class Output(msgspec.Struct, frozen=True):
    """What one use of the program wrote. It is the program's word, to be trusted in nothing."""

    exit_code: int
    """-9 for a process that was killed by signal 9."""
    data: bytes
