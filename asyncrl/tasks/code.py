"""Programs to write, each with the tests that judge it.

{"prompt": "Read a number, print its square.", "tests": [{"stdin": "3\\n", "stdout": "9\\n"}]}
{"prompt": "Write square(x).", "tests": [{"call": "square", "args": [3], "returns": 9}]}
"""

from typing import Any

import msgspec

from asyncrl.config.task import CodeTask, Limits
from asyncrl.sandbox.base import Input
from asyncrl.tasks.tables import Lines
from asyncrl.types import Prompt


class Test(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either a run of the program and what it must print, or a call of a function and what it must return."""

    __test__ = False  # its name means something to pytest

    stdin: str = ""
    args: tuple[Any, ...] = ()
    stdout: str | msgspec.UnsetType = msgspec.UNSET
    call: str = ""
    returns: Any = msgspec.UNSET

    def __post_init__(self) -> None:
        if bool(self.call) == (self.returns is msgspec.UNSET) or bool(self.call) == isinstance(self.stdout, str):
            raise ValueError("a test has either `stdout`, or `call` and `returns`")
        if not self.call and not all(isinstance(argument, str) for argument in self.args):
            raise ValueError("`args` of a program are strings")

    @property
    def input(self) -> Input:
        """All of the test that the program gets to see."""
        return Input(self.stdin, self.args, self.call)


class Problem(msgspec.Struct, frozen=True):
    """What `Prompt.answer` holds, as JSON: all that judging needs."""

    tests: list[Test]
    limits: Limits


class _CodeRow(msgspec.Struct, frozen=True):
    prompt: str
    tests: list[Test]

    def __post_init__(self) -> None:
        if not self.prompt or not self.tests:
            raise ValueError(f"`{'tests' if self.prompt else 'prompt'}` is empty")


class Code(Lines):
    """The problems of a file."""

    EXAMPLE = '{"prompt": "Print 2.", "tests": [{"stdout": "2"}]}'

    def __init__(self, settings: CodeTask, seed: int) -> None:
        self._limits = settings.limits
        super().__init__(settings, seed)

    def _decode(self, line: bytes, uid: str) -> Prompt:
        row = msgspec.json.decode(line, type=_CodeRow)
        answer = msgspec.json.encode(Problem(row.tests, self._limits)).decode()
        return Prompt(uid=uid, text=row.prompt, answer=answer)
