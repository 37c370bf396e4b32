"""Answers that are programs: the last block of Python is run on all tests, and judged where it cannot interfere."""

import asyncio
import json
import re
import subprocess
import sys
import uuid
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from asyncrl.config import load
from asyncrl.config.task import CodeTask, Limits
from asyncrl.errors import ConfigError
from asyncrl.sandbox.base import Output
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.tasks.code import Problem, Test
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.protocol import RewardResult
from asyncrl.user_code.score import Score
from examples import own_code

REWARD, PARTIAL = "asyncrl.rewards.code:reward", "asyncrl.rewards.code:partial_reward"


def block(program: str) -> str:
    return f"I think it is\n```python\n{program}\n```\nDone."


@pytest.fixture
def problems(sandbox: Sandbox, tmp_path: Path) -> str:
    rows = [json.dumps({"prompt": text, "tests": tests}) + "\n" for text, tests in own_code.PROBLEMS.items()]
    (tmp_path / "problems.jsonl").write_text("".join(rows))
    return str(tmp_path / "problems.jsonl")


def judge(problems: str, *answers: str, function: str = REWARD) -> list[RewardResult]:
    """In a worker of the reward pool, as in a run."""
    return asyncio.run(own_code.judge(problems, list(answers), function))


@pytest.mark.usefixtures("sandbox")
def test_the_example_runs_as_its_first_lines_say(tmp_path: Path) -> None:
    command = [sys.executable, own_code.__file__, str(tmp_path / "problems.jsonl")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1.0, 1.0, 1.0]\n"


def test_wrong_looping_crashing_and_malicious_answers_get_nothing(problems: str, tmp_path: Path) -> None:
    wrong = [block("print(3)"), block("print('a b')"), block("def is_even(n): return 1")]
    assert judge(problems, *wrong) == [0.0, 0.0, 0.0]
    canary = tmp_path / "canary"
    malicious = f"""
import os
try: open({str(canary)!r}, "w")
except OSError: os.system("touch {canary}")
class Agrees(int):
    def __eq__(self, other): return True
def is_even(n): return Agrees(n)
"""
    looping, crashing = block("while True: pass"), block("print('b a', flush=True)\nimport os\nos.abort()")
    assert judge(problems, looping, crashing, block(malicious)) == [0.0, 0.0, 0.0]
    assert not canary.exists()


def test_part_of_the_tests_is_part_of_the_reward(problems: str) -> None:
    half = [block("print(3)"), "no program", block("def is_even(n): return n != 7 or 1 / 0")]
    assert judge(problems, *half, function=PARTIAL) == [
        Score(passed, {"program": program, "all_passed": 0.0}) for passed, program in ((0.5, 1), (0, 0), (0.5, 1))
    ]


SEARCH = """
import gc, sys
frame = sys._getframe()
while frame:
    print(frame.f_locals, frame.f_globals)
    frame = frame.f_back
for thing in gc.get_objects():
    try: print(repr(thing)[:100_000])
    except Exception: pass
"""


def test_what_is_expected_never_enters_the_sandbox(sandbox: Sandbox) -> None:
    expected, given = uuid.uuid4().hex, uuid.uuid4().hex
    tests = [Test(stdin=given, stdout=expected)]
    (output,) = sandbox.run(SEARCH, [test.input for test in tests], Limits(output_bytes=32 << 20, cpu_s=20, wall_s=60))
    assert given.encode() in output.data  # it did search
    assert expected.encode() not in output.data


@pytest.fixture
def code(sandbox: Sandbox) -> ModuleType:
    return import_module("asyncrl.rewards.code")  # not at the top: it needs a sandbox


def test_the_last_block_of_python_is_the_program(code: ModuleType) -> None:
    assert code.extract_program("```python\na\n```\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert code.extract_program("``` Python \nx = '```'\n```") == "x = '```'\n"
    assert code.extract_program("print(1)") is None
    assert code.extract_program("```python\nunfinished") is None
    assert code.extract_program("```\nprint(1)\n```") is None


@pytest.mark.parametrize(
    ("output", "test", "right"),
    [
        (Output(0, b"1 \n2\n\n"), Test(stdout="1\n2"), True),
        (Output(0, b" 1\n2"), Test(stdout="1\n2"), False),
        (Output(1, b"1\n2"), Test(stdout="1\n2"), False),
        (Output(0, b"\xff"), Test(stdout="\ufffd?"), False),
        (Output(0, b""), Test(stdout=""), True),
        (Output(0, b"[1, 2.0, {\"a\": null}]"), Test(call="f", returns=[1, 2, {"a": None}]), True),
        (Output(0, b"1"), Test(call="f", returns=True), False),
        (Output(0, b"[1, 2]"), Test(call="f", returns=[1]), False),
        (Output(0, b"{\"a\": 1}"), Test(call="f", returns={"b": 1}), False),
        (Output(0, b"null"), Test(call="f", returns=None), True),
        (Output(0, b""), Test(call="f", returns=None), False),
        (Output(0, b"[" * 100_000), Test(call="f", returns=[]), False),
        (Output(0, b"\"\xff\""), Test(call="f", returns=""), False),
    ],
)  # fmt: skip
def test_output_is_compared_by_lines_or_by_value(code: ModuleType, output: Output, test: Test, right: bool) -> None:
    assert code.is_right(output, test) is right


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, "missing required field `tests`"),
        ({"prompt": "p", "tests": []}, "`tests` is empty"),
        ({"prompt": "", "tests": [{"stdout": "1"}]}, "`prompt` is empty"),
        ({"prompt": "p", "tests": [{}]}, "a test has either `stdout`, or `call` and `returns`"),
        ({"prompt": "p", "tests": [{"call": "f"}]}, "either `stdout`, or `call` and `returns`"),
        ({"prompt": "p", "tests": [{"stdout": "", "returns": 1}]}, "either `stdout`, or `call` and `returns`"),
        ({"prompt": "p", "tests": [{"call": "f", "stdout": "", "returns": 1}]}, "either `stdout`, or"),
        ({"prompt": "p", "tests": [{"args": [1], "stdout": ""}]}, "`args` of a program are strings"),
        ({"prompt": "p", "tests": [{"stdout": "", "sdtin": ""}]}, "unknown field `sdtin`"),
    ],
)
def test_a_bad_problem_is_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=rf"line 1: .*{re.escape(message)}.*expected an object such as"):
        make_task(CodeTask(path=str(path)), seed=0)


def test_the_answer_carries_tests_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"prompt": "p", "tests": [{"call": "f", "args": [[1]], "returns": None}]}))
    prompt = make_task(CodeTask(path=str(path), limits=Limits(cpu_s=3)), seed=0).prompt("train", 5)
    problem = msgspec.json.decode(prompt.answer, type=Problem)
    assert problem == Problem([Test(call="f", args=([1],), returns=None)], Limits(cpu_s=3))


def test_a_judge_that_cannot_judge_programs_is_refused() -> None:
    task = {"type": "code", "path": "p.jsonl"}
    with pytest.raises(
        ConfigError, match=r"cannot judge task=code; set reward\.function=asyncrl\.rewards\.code:reward"
    ):
        load({"task": task})
    with pytest.raises(ConfigError, match=r"reward\.timeout_s=5 would drop .*wall_s=10 .* set reward\.timeout_s=15"):
        load({"task": task, "reward": {"function": REWARD}})
    load({"task": task, "reward": {"function": REWARD, "timeout_s": 15}})
