"""What honest programs can rely on, and how a machine without a sandbox is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import Reward
from asyncrl.config.task import Limits
from asyncrl.errors import ConfigError, SandboxError
from asyncrl.sandbox.base import Input, Output
from asyncrl.sandbox.sandbox import Sandbox
from asyncrl.user_code.pool import check_function
from tests.support.sandbox_host import descendants

LIMITS = Limits()
CODE_REWARD = "asyncrl.rewards.code:reward"


def run(sandbox: Sandbox, program: str, *inputs: Input, limits: Limits = LIMITS) -> list[Output]:
    return list(sandbox.run(program, inputs or [Input()], limits))


@pytest.mark.parametrize("kind", ["sandbox", "uncontained"])
def test_each_input_is_a_run_of_its_own(kind: str, request: pytest.FixtureRequest) -> None:
    sandbox: Sandbox = request.getfixturevalue(kind)
    program = "import sys\ncount = globals().get('count', 0) + 1\nprint(count, sys.argv[1:], sys.stdin.read())"
    outputs = run(sandbox, program, Input(stdin="a\nb", args=("x",)), Input(stdin="c"))
    assert outputs == [Output(0, b"1 ['x'] a\nb\n"), Output(0, b"1 [] c\n")]


def test_functions_and_methods_answer_in_json_whatever_they_print(sandbox: Sandbox) -> None:
    program = """
print("hello")
class Solution:
    def swap(self, pair): print("noise"); return tuple(reversed(pair))
def grow(x, by): return {"x": x + by}
if __name__ == "__main__": raise SystemExit(9)
"""
    uses = [Input(call="Solution.swap", args=([1, 2],)), Input(call="grow", args=(1.5, 2)), Input(call="nothing")]
    outputs = run(sandbox, program, *uses)
    assert outputs == [Output(0, b"[2, 1]"), Output(0, b'{"x": 3.5}'), Output(1, b"")]


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("def f(:", Output(1, b"")),
        ("print(1)\nraise ValueError", Output(1, b"1\n")),
        ("import sys\nsys.exit(7)", Output(7, b"")),
        ("exit_code = 'no'\nraise SystemExit(exit_code)", Output(1, b"")),
        ("import os\nos.abort()", Output(-6, b"")),
        ("import ctypes\nctypes.string_at(0)", Output(-11, b"")),
        ("import atexit\natexit.register(print, 'last')\nprint('first')", Output(0, b"first\nlast\n")),
        (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
            Output(0, b"thread\n"),
        ),
        ("import subprocess\nsubprocess.run(['echo', 'child'])", Output(0, b"child\n")),
        ("print('\\u00e9')", Output(0, "é\n".encode())),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nprint(A(), __name__)",
            Output(0, b"A(x=1) __main__\n"),
        ),
        ("open('file', 'w').write('kept')\nprint(open('file').read())", Output(0, b"kept\n")),
    ],
)
def test_a_program_ends_as_it_would_by_itself(sandbox: Sandbox, program: str, output: Output) -> None:
    assert run(sandbox, program) == [output]


def test_the_same_program_says_the_same_twice(sandbox: Sandbox) -> None:
    program = "print(list({'one', 'two', 'three', 'four', 'five'}))"
    assert run(sandbox, program) == run(sandbox, program)


def test_a_loop_costs_its_input_a_sleep_costs_the_rest(sandbox: Sandbox) -> None:
    program = "x = input()\nimport time\nwhile x == 'loop': pass\nwhile x == 'sleep': time.sleep(1)\nprint(x)"
    a, loop, b, sleep = (Input(stdin=word) for word in ("a", "loop", "b", "sleep"))
    outputs = run(sandbox, program, a, loop, b, limits=Limits(cpu_s=1, wall_s=60))
    assert outputs == [Output(0, b"a\n"), Output(-9, b""), Output(0, b"b\n")]
    assert run(sandbox, program, a, sleep, b, limits=Limits(wall_s=3)) == [Output(0, b"a\n")]


def test_large_inputs_and_outputs_arrive_whole(sandbox: Sandbox) -> None:
    text = "0123456789" * 400_000
    outputs = run(sandbox, "print(input(), end='')", Input(stdin=text), limits=Limits(output_bytes=4_000_000))
    assert outputs == [Output(0, text.encode())]


def test_who_has_seen_enough_ends_it(sandbox: Sandbox) -> None:
    before = descendants(os.getpid())
    outputs = sandbox.run("print(1)", [Input()] * 1000, LIMITS)
    assert next(outputs) == Output(0, b"1\n")
    outputs.close()
    assert descendants(os.getpid()) == before


def test_descriptors_are_given_back(sandbox: Sandbox) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        run(sandbox, "print(1)")
    assert os.listdir("/proc/self/fd") == before


def test_without_bubblewrap_it_refuses_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="`apt-get install bubblewrap`"):
        Sandbox()
    with pytest.raises(ConfigError, match=rf"reward\.function={CODE_REWARD} .*`apt-get install bubblewrap`"):
        check_function(Reward(function=CODE_REWARD))


def test_without_namespaces_it_refuses_with_the_words_of_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"\(bwrap: No permissions to create new namespace\).*sysctl -w user\."):
        Sandbox()


def test_the_way_around_is_loud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_function(Reward(function=CODE_REWARD, allow_unsafe_exec=True))
    assert "WARNING: reward.allow_unsafe_exec=true: code written by the model runs as you" in capfd.readouterr().err


OTHER_USER = 12345
SYSTEM_PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
AS_OTHER_USER = """
import os
from asyncrl.config.task import Limits
from asyncrl.sandbox.base import Input
from asyncrl.sandbox.sandbox import Sandbox
program = '''
import os, time
print(os.getuid())
try:
    for count in range(100): os.fork() or (time.sleep(1), os._exit(0))
except OSError: print(count)
'''
print(os.getuid())
print(*(output.data.decode() for output in Sandbox().run(program, [Input()], Limits())))
"""


@pytest.mark.usefixtures("sandbox")
def test_users_who_are_not_root_are_contained_and_counted_as_well(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The suite often runs as root; then another user is tried, with an interpreter that others may read."""
    if os.geteuid() != 0 or shutil.which(SYSTEM_PYTHON) is None:
        pytest.skip(f"needs root and {SYSTEM_PYTHON}: a system where that is Python")
    import msgspec

    paths = [Path(__file__).parents[2], Path(msgspec.__file__).parents[1]]
    command = [SYSTEM_PYTHON, "-c", AS_OTHER_USER]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths))}
    probe = subprocess.run(
        command, env=environment, user=OTHER_USER, group=OTHER_USER, extra_groups=[], cwd="/", capture_output=True
    )
    if b"No module named" in probe.stderr:
        pytest.skip("needs a checkout that other users may read: chmod a+rX")
    assert probe.stdout.split() == [b"12345", b"65534", b"7"], probe.stderr
