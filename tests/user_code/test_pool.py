"""Rewards in killable processes: whatever the user's function does, each sample gets a result and the pool goes on."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.config import Reward
from asyncrl.errors import ConfigError
from asyncrl.user_code.pool import RewardPool, check_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score

FUNCTIONS = '''
import math, os, signal, subprocess, sys, time
from fractions import Fraction

def behave(prompt, completion, answer):
    """Does what the completion says."""
    return globals()[completion](answer)

def good(answer): return float(answer)
def boolean(answer): return True
def fraction(answer): return Fraction(1, 4)
def raises(answer): raise ValueError("no reward for " + answer)
def nan(answer): return math.nan
def infinite(answer): return -math.inf
def text(answer): return "1.0"
def nothing(answer): pass
def pid(answer): return os.getpid()
def hang(answer): time.sleep(1000)
def spin(answer):
    while True: pass
def deaf(answer):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
def exits(answer): os._exit(3)
def polite(answer): sys.exit("bye")
def crashes(answer): os.kill(os.getpid(), signal.SIGSEGV)
def noisy(answer):
    print("printed by the reward function")
    os.write(1, b"\\xff" * 1000)
    sys.stdout.buffer.write(b"\\x00" * 1000)
    return float(len(sys.stdin.read()))
def family(answer):
    """Starts a process of its own, leaves its id, and hangs."""
    child = subprocess.Popen(["sleep", "1000"])
    with open(answer, "w") as file: file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
def heavy(answer): return float("torch" in sys.modules or "ray" in sys.modules)
def secrets(answer): return float(sum(name.endswith(("_TOKEN", "_KEY")) for name in os.environ))
def path(answer): return float("PATH" in os.environ)
def parts(answer): return {"right": 1, "format": float(answer)}
def total(answer):
    from asyncrl.user_code.score import Score
    return Score(float(answer), {"tokens": 341})
def nanpart(answer): return {"right": 1.0, "format": float("nan")}
def textpart(answer): return {"right": "yes"}
def badname(answer): return {"Right!": 1.0}
def noparts(answer): return {}
def many(answer): return {f"part_{i}": 1.0 for i in range(33)}
def toolarge(answer): return {"a": 1e308, "b": 1e308}
def huge(answer): return 10 ** 400
'''


@pytest.fixture
def settings(tmp_path: Path) -> Reward:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return Reward(function=f"{file}:behave", timeout_s=60.0)


@pytest.fixture
def impatient(settings: Reward) -> Reward:
    return Reward(function=settings.function, timeout_s=1.0)


def score(settings: Reward, *samples: str | tuple[str, str]) -> list[RewardResult]:
    async def run() -> list[RewardResult]:
        pool = RewardPool(settings)
        try:
            return await pool.score(inputs(samples))
        finally:
            await pool.close()

    return asyncio.run(run())


def inputs(samples: Sequence[str | tuple[str, str]]) -> list[RewardInput]:
    pairs = [(sample, "0.5") if isinstance(sample, str) else sample for sample in samples]
    return [RewardInput("question", what, answer) for what, answer in pairs]


def reasons(results: list[RewardResult]) -> list[float | Score | str]:
    return [result.reason if isinstance(result, RewardFailure) else result for result in results]


def wait_until(condition: Callable[[], bool]) -> None:
    """Pytest's own time limit ends a wait that would not."""
    while not condition():
        time.sleep(0.01)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_any_finite_number_is_a_reward(settings: Reward) -> None:
    assert score(settings, ("good", "0.5"), ("good", "-7"), "boolean", "fraction") == [0.5, -7.0, 1.0, 0.25]


def test_what_is_no_number_is_invalid(settings: Reward) -> None:
    results = score(settings, "nan", "infinite", "text", "nothing", "good")
    assert reasons(results) == ["reward_invalid"] * 4 + [0.5]
    assert "returned nan" in str(results[0])
    assert "returned None; a reward must be a finite number" in str(results[3])


def test_a_reward_may_have_parts(settings: Reward) -> None:
    assert score(settings, ("parts", "0.25"), ("total", "7"), "good") == [
        Score(1.25, {"right": 1.0, "format": 0.25}),
        Score(7.0, {"tokens": 341.0}),
        0.5,
    ]


def test_bad_parts_are_invalid_as_bad_numbers_are(settings: Reward) -> None:
    results = score(settings, "nanpart", "textpart", "badname", "noparts", "many", "toolarge", "huge", "good")
    assert reasons(results) == ["reward_invalid"] * 7 + [0.5]
    assert all("a reward must be a finite number, or 1 to 32 of them as a dict" in str(each) for each in results[:7])


def test_an_exception_costs_its_sample_only(settings: Reward) -> None:
    results = score(settings, "good", ("raises", "you"), "good")
    assert reasons(results) == [0.5, "reward_error", 0.5]
    assert "ValueError: no reward for you" in str(results[1])
    assert "functions.py:" in str(results[1])


@pytest.mark.parametrize("what", ["hang", "spin", "deaf"])
def test_a_hung_function_is_killed_and_the_rest_is_scored(impatient: Reward, what: str) -> None:
    before, timeout, *after = score(impatient, "pid", what, "pid", "pid")
    assert isinstance(timeout, RewardFailure)
    assert timeout.reason == "reward_timeout"
    assert "within 1 s" in timeout.message
    assert before != after[0] == after[1]  # another process, and only one
    assert not _runs(int(str(before).partition(".")[0]))


@pytest.mark.parametrize(
    ("what", "fate"), [("exits", "exit code 3"), ("polite", "exit code 1"), ("crashes", "killed by SIGSEGV")]
)
def test_a_process_that_ends_is_an_error_and_replaced(settings: Reward, what: str, fate: str) -> None:
    results = score(settings, "good", what, what, "good")
    assert reasons(results) == [0.5, "reward_error", "reward_error", 0.5]
    assert fate in str(results[1])


def test_a_worker_that_dies_between_two_calls_costs_no_sample(settings: Reward) -> None:
    async def run() -> list[RewardResult]:
        pool = RewardPool(settings)
        (pid,) = await pool.score(inputs(["pid"]))
        assert isinstance(pid, float)
        os.kill(int(pid), signal.SIGKILL)
        child = pool._workers[0]._child
        assert child is not None
        assert await child.fate() == "killed by SIGKILL"  # gone, reaped, and known to be
        results = await pool.score(inputs(["good"]))
        await pool.close()
        return results

    assert asyncio.run(run()) == [0.5]


def test_the_function_cannot_touch_the_protocol(settings: Reward, capfd: pytest.CaptureFixture[str]) -> None:
    assert score(settings, "noisy", "good") == [0.0, 0.5]
    captured = capfd.readouterr()
    assert "printed by the reward function" in captured.err
    assert not captured.out


def test_the_worker_is_light_and_sees_no_secrets(settings: Reward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert score(settings, "heavy", "secrets", "path") == [0.0, 0.0, 1.0]


def test_results_keep_their_order_over_workers_and_shares(settings: Reward) -> None:
    several = Reward(function=settings.function, workers=3)
    samples = [("good", str(i)) for i in range(500)]
    assert score(several, *samples) == [float(i) for i in range(500)]
    assert score(several) == []


def test_calls_may_overlap(settings: Reward) -> None:
    async def run() -> list[list[RewardResult]]:
        pool = RewardPool(settings)
        results = await asyncio.gather(*(pool.score(inputs([("good", str(i))])) for i in range(50)))
        await pool.close()
        return results

    assert asyncio.run(run()) == [[float(i)] for i in range(50)]


def test_a_cancelled_call_leaves_no_answers_to_the_next(settings: Reward) -> None:
    async def run() -> list[RewardResult]:
        pool = RewardPool(settings)
        await pool.score(inputs(["good"]))
        call = asyncio.ensure_future(pool.score(inputs([("good", "1"), ("good", "2"), "hang"])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        results = await pool.score(inputs([("good", "3")]))
        await pool.close()
        return results

    assert asyncio.run(run()) == [3.0]


def test_an_event_loop_held_up_past_the_deadline_blames_nobody(impatient: Reward) -> None:
    async def run() -> list[RewardResult]:
        pool = RewardPool(impatient)
        await pool.score(inputs(["good"]))
        call = asyncio.ensure_future(pool.score(inputs(["good"])))
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        time.sleep(2 * impatient.timeout_s)  # noqa: ASYNC251  (the hold-up)
        results = await call
        await pool.close()
        return results

    assert asyncio.run(run()) == [0.5]


def test_closing_fails_what_is_under_way(settings: Reward, tmp_path: Path) -> None:
    async def run() -> list[RewardResult]:
        pool = RewardPool(settings)
        note = tmp_path / "pids"
        call = asyncio.ensure_future(pool.score(inputs([("family", str(note)), "good"])))
        await asyncio.to_thread(wait_until, lambda: note.exists() and note.read_text() != "")
        await pool.close()
        results = await call
        await pool.close()
        await asyncio.to_thread(wait_until_gone, [int(pid) for pid in note.read_text().split()])
        return results

    assert reasons(asyncio.run(run())) == ["reward_error", "reward_error"]


def test_the_processes_of_a_hung_function_die_with_it(impatient: Reward, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    assert reasons(score(impatient, ("family", str(note)))) == ["reward_timeout"]
    wait_until_gone([int(pid) for pid in note.read_text().split()])


PARENT = """
import asyncio, sys
from asyncrl.config import Reward
from asyncrl.user_code.protocol import RewardInput
from asyncrl.user_code.pool import RewardPool

async def main():
    idle = RewardPool(Reward(function=sys.argv[1], timeout_s=600))
    print(int((await idle.score([RewardInput("", "pid", "")]))[0]), flush=True)
    await RewardPool(Reward(function=sys.argv[1], timeout_s=600)).score([RewardInput("", "family", sys.argv[2])])

asyncio.run(main())
"""


def test_workers_idle_or_hung_die_when_their_parent_is_killed(settings: Reward, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, settings.function, str(note)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        idle = int(parent.stdout.readline())
        wait_until(lambda: note.exists() and note.read_text() != "")
        workers = [idle, *(int(pid) for pid in note.read_text().split())]
        assert len(workers) == 3
        assert all(_runs(pid) for pid in workers)
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(workers)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("asyncrl.no_such:reward", "ModuleNotFoundError: No module named 'asyncrl.no_such'"),
        ("asyncrl.tasks.chains:no_such", "asyncrl.tasks.chains has no function 'no_such'"),
        ("asyncrl.tasks.chains", "cannot be used"),
        ("nowhere/file.py:reward", "FileNotFoundError: .*nowhere/file.py"),
        ("{tmp}/broken.py:reward", r"ZeroDivisionError: division by zero \(.*broken.py:2\)"),
        ("{tmp}/leaves.py:reward", "importing it ended the process with code 4"),
        ("{tmp}/broken.py:", "ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_config_error(tmp_path: Path, function: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("print('hello')\n1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(4)\n")
    settings = Reward(function=function.format(tmp=tmp_path))
    with pytest.raises(ConfigError, match=message) as error:
        check_function(settings)
    assert f"reward.function={settings.function} cannot be used" in str(error.value)


def test_a_function_that_can_be_imported_passes(settings: Reward, tmp_path: Path) -> None:
    check_function(Reward())
    check_function(settings)
    (tmp_path / "neighbour.py").write_text("def reward(prompt, completion, answer): return 2\n")
    (tmp_path / "json.py").write_text("from neighbour import reward\n")
    assert score(Reward(function=f"{tmp_path}/json.py:reward"), "anything") == [2.0]


def test_a_function_that_vanishes_later_is_an_error_of_each_sample(settings: Reward) -> None:
    Path(settings.function.partition(":")[0]).unlink()
    results = score(settings, "good", "good")
    assert reasons(results) == ["reward_error", "reward_error"]
    assert "cannot be imported: FileNotFoundError" in str(results[0])
