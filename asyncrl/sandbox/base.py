"""The input and output of a sandboxed program. Expected outputs never enter the sandbox: the caller judges."""

import os
import sys
from typing import Any

import msgspec

START_S = 30.0
"""Until the interpreter inside answers. The program's own time begins then, so a busy machine costs it nothing."""
END_S = 10.0
INTERPRETER = os.path.realpath(sys.executable)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""All of it. The same program must print the same twice, also what depends on the order of a set."""

WAY_AROUND = "or give reward.allow_unsafe_exec=true, with which it can do all that you can do"


class Input(msgspec.Struct, frozen=True):
    """One use of the program: run it with this stdin and these arguments, or call a function it defines."""

    stdin: str = ""
    args: tuple[Any, ...] = ()
    """Of a program: strings. Of a function: values of JSON."""
    call: str = ""
    """`function`, or `Class.method` of an instance made without arguments; what it returns is written as JSON."""


class Output(msgspec.Struct, frozen=True):
    """What one use of the program wrote. The program controls it: trust nothing in it."""

    exit_code: int
    """-9 for a process that was killed by signal 9."""
    data: bytes
