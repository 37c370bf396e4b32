"""Rewards for programs: the last fenced block of Python in the completion is run on every test, in a sandbox.

The program sees the inputs. The expected output stays here, and so does the comparison.
"""

import os
import re
from collections.abc import Generator
from contextlib import closing
from typing import Any, cast

import msgspec

from asyncrl.sandbox.base import Output
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.tasks.code import Problem, Test
from asyncrl.user_code.protocol import ALLOW_UNSAFE_EXEC
from asyncrl.user_code.score import Score

FENCED = re.compile(r"^```[ \t]*(?:python3?|py)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
# Made at import, so that a machine that cannot contain programs is refused before the run starts.
SANDBOX = Sandbox(allow_unsafe=ALLOW_UNSAFE_EXEC in os.environ)


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 if every test is passed; running ends with the first that is not."""
    problem = msgspec.json.decode(answer, type=Problem)
    with closing(_verdicts(completion, problem)) as verdicts:
        return float(all(verdicts))


def partial_reward(prompt: str, completion: str, answer: str) -> Score:
    """The share of the tests that are passed; its parts tell whether there is a program, and whether it passes all."""
    problem = msgspec.json.decode(answer, type=Problem)
    passed = sum(_verdicts(completion, problem)) / len(problem.tests)
    return Score(passed, {"program": float(extract_program(completion) is not None), "all_passed": float(passed == 1)})


def extract_program(completion: str) -> str | None:
    """The last fenced block that says it is Python."""
    blocks = FENCED.findall(completion)
    return blocks[-1] if blocks else None


def _verdicts(completion: str, problem: Problem) -> Generator[bool]:
    """One for each test; False for all that a program which ended the sandbox did not come to."""
    program = extract_program(completion)
    tests = iter(problem.tests)
    if program is not None:
        with closing(SANDBOX.run(program, [test.input for test in problem.tests], problem.limits)) as outputs:
            for output in outputs:
                yield is_right(output, next(tests))
    for _ in tests:
        yield False


def is_right(output: Output, test: Test) -> bool:
    """Whether the program ended well and said what it should, white space at the ends of lines aside."""
    if output.exit_code != 0:
        return False
    if isinstance(test.stdout, str):
        return _lines(output.data.decode(errors="replace")) == _lines(test.stdout)
    try:
        returned = msgspec.json.decode(output.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return _same(returned, test.returns)


def _same(returned: Any, expected: Any) -> bool:
    """Equal in Python's eyes, except that True is not 1."""
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, list) and isinstance(expected, list):
        pairs = cast(list[Any], returned), cast(list[Any], expected)
        return len(pairs[0]) == len(pairs[1]) and all(map(_same, *pairs))
    if isinstance(returned, dict) and isinstance(expected, dict):
        left, right = cast(dict[str, Any], returned), cast(dict[str, Any], expected)
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return returned == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
