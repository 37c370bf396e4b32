"""Harnesses in killable processes: many at a time in one, each with its own end, whatever its neighbours do."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.user_code import Agent
from asyncrl.errors import ConfigError
from asyncrl.user_code import harness_pool
from asyncrl.user_code.agents import Access, EpisodeResult, Outcome, Task, read_outcome
from asyncrl.user_code.harness_pool import HarnessPool
from asyncrl.user_code.pool import check_function
from asyncrl.user_code.protocol import RewardFailure
from asyncrl.user_code.score import Score

HARNESSES = """
import asyncio, os, subprocess, sys, threading, time

def plain(prompt, answer, access):
    return globals()[prompt](answer, access)

async def tasks(prompt, answer, access):
    found = globals()[prompt](answer, access)
    return await found if asyncio.iscoroutine(found) else found

def text(answer, access): return f"{answer} {access.url} {access.key}"
def nothing(answer, access): return None
def reward(answer, access): return {"right": 1.0, "format": 0.5}
def outcome(answer, access):
    from asyncrl.user_code.agents import Outcome
    return Outcome(result="a", turn_rewards=(1, 0.5))
def pid(answer, access): return str(os.getpid())
def secrets(answer, access): return str(sorted(name for name in os.environ if name.endswith(("_TOKEN", "_KEY"))))
def raises(answer, access): raise ValueError("no way " + answer)
def polite(answer, access): sys.exit("bye")
def odd(answer, access): return object()
def cancelled(answer, access): raise asyncio.CancelledError("its own")
def half(answer, access): return "half of \\ud83d"
def two_halves(answer, access): return "\\ud83d\\ude00"
def fails_by_half(answer, access): raise ValueError("half of \\ud83d")
class Shy:
    def __repr__(self): raise ValueError("not to be shown")
def shy(answer, access): return Shy()
def dies(answer, access): os._exit(3)
def sleeps(answer, access): time.sleep(float(answer)); return str(os.getpid())
async def waits(answer, access): await asyncio.sleep(float(answer)); return str(os.getpid())
async def stubborn(answer, access):
    while True:
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: pass
"""
ACCESS = Access("http://127.0.0.1:1/v1", "sk-one")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "harnesses.py"
    path.write_text(HARNESSES)
    return path


def play(settings: Agent, *episodes: tuple[str, str]) -> list[EpisodeResult | RewardFailure]:
    async def all_at_once() -> list[EpisodeResult | RewardFailure]:
        pool = HarnessPool(settings)
        tasks = [Task(str(i), prompt, answer, ACCESS) for i, (prompt, answer) in enumerate(episodes)]
        try:
            return await asyncio.gather(*(pool.play(task) for task in tasks))
        finally:
            await pool.close()

    return asyncio.run(all_at_once())


def reasons(results: Sequence[EpisodeResult | RewardFailure]) -> list[str]:
    return [result.reason if isinstance(result, RewardFailure) else "" for result in results]


@pytest.mark.parametrize("kind", ["plain", "tasks"])
def test_whatever_it_does_is_a_result(file: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    names = ("text", "nothing", "reward", "outcome", "raises", "polite", "odd", "secrets")
    found = play(Agent(function=f"{file}:{kind}"), *((name, "7") for name in names))
    assert found[:4] == [
        EpisodeResult("7 http://127.0.0.1:1/v1 sk-one"),
        EpisodeResult(),
        EpisodeResult(reward=Score(1.5, {"right": 1.0, "format": 0.5})),
        EpisodeResult("a", turn_rewards=(1.0, 0.5)),
    ]
    assert reasons(found[4:7]) == ["agent_error", "agent_error", "agent_invalid"]
    assert isinstance(found[4], RewardFailure)
    assert f"ValueError: no way 7 ({file}:" in found[4].message
    assert isinstance(found[5], RewardFailure)
    assert "sys.exit('bye')" in found[5].message
    assert found[7] == EpisodeResult("[]")


@pytest.mark.parametrize("kind", ["plain", "tasks"])
def test_what_cannot_be_told_as_it_is_does_not_wait_for_its_time(file: Path, kind: str) -> None:
    names = ("half", "two_halves", "fails_by_half", "cancelled", "shy")
    found = play(Agent(function=f"{file}:{kind}", timeout_s=20.0), *((name, "") for name in names))
    assert found[:2] == [EpisodeResult("half of \ufffd"), EpisodeResult("\U0001f600")]
    assert reasons(found[2:]) == ["agent_error"] * 3
    assert isinstance(found[2], RewardFailure)
    assert "ValueError: half of \ufffd" in found[2].message


@pytest.mark.parametrize(("kind", "sleep"), [("plain", "sleeps"), ("tasks", "waits")])
def test_many_at_a_time_in_one_process_and_no_more_than_allowed(file: Path, kind: str, sleep: str) -> None:
    async def scenario() -> None:
        pool = HarnessPool(Agent(function=f"{file}:{kind}", concurrency=20, workers=2))
        tasks = [Task(str(i), sleep, "0.5", ACCESS) for i in range(60)]
        playing = [asyncio.create_task(pool.play(task)) for task in tasks]
        most = 0
        while not all(task.done() for task in playing):
            most = max(most, pool.playing)
            assert pool.playing + pool.queued <= 60
            await asyncio.sleep(0.01)
        results = [await task for task in playing]
        assert most == 40
        assert len({result.text for result in results if isinstance(result, EpisodeResult)}) == 2
        await pool.close()

    asyncio.run(scenario())


def test_one_that_dies_takes_its_process_and_the_next_one_starts_it_again(file: Path) -> None:
    async def scenario() -> None:
        pool = HarnessPool(Agent(function=f"{file}:tasks"))
        neighbour = asyncio.create_task(pool.play(Task("a", "waits", "1000", ACCESS)))
        await _until(lambda: bool(pool.judging))
        died = await pool.play(Task("b", "dies", "", ACCESS))
        assert reasons([died, await neighbour]) == ["agent_error", "agent_error"]
        assert isinstance(died, RewardFailure)
        assert "exit code 3" in died.message
        again = await pool.play(Task("c", "pid", "", ACCESS))
        assert isinstance(again, EpisodeResult)
        assert pool.playing == 0
        await pool.close()
        assert not psutil.pid_exists(int(again.text or ""))

    asyncio.run(scenario())


async def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "late", "answer", "fate"),
    [
        ("tasks", "waits", "1000", "ends"),  # a task is cancelled
        ("plain", "sleeps", "1000", "retires"),  # a thread cannot be
        ("tasks", "stubborn", "", "retires"),
        ("tasks", "sleeps", "1000", "killed"),  # it holds up its event loop, and all others in it
    ],
)
def test_past_its_time(
    file: Path, kind: str, late: str, answer: str, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness_pool, "CANCEL_S", 0.5)

    async def scenario() -> None:
        pool = HarnessPool(Agent(function=f"{file}:{kind}", timeout_s=0.5))
        before = await pool.play(Task("a", "pid", "", ACCESS))
        assert isinstance(before, EpisodeResult)
        first = int(before.text or "")
        assert reasons([await pool.play(Task("b", late, answer, ACCESS))]) == ["agent_timeout"]
        if fate == "ends":
            await _until(lambda: pool.playing == 0)
            assert psutil.pid_exists(first)
        else:
            await _until(lambda: not psutil.pid_exists(first))
        after = await pool.play(Task("c", "pid", "", ACCESS))
        assert isinstance(after, EpisodeResult)
        assert (int(after.text or "") == first) == (fate == "ends")
        await pool.close()

    asyncio.run(scenario())


def test_a_worker_that_retires_ends_after_the_others_in_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_pool, "CANCEL_S", 0.2)

    async def scenario() -> None:
        pool = HarnessPool(Agent(function=f"{file}:plain"))
        in_time = asyncio.create_task(pool.play(Task("a", "sleeps", "2", ACCESS)))
        hangs = asyncio.create_task(pool.play(Task("b", "sleeps", "1000", ACCESS)))
        await _until(lambda: len(pool.judging) == 2)
        old = pool.judging[0].pid
        hangs.cancel()
        await asyncio.sleep(0.5)
        elsewhere = await pool.play(Task("c", "pid", "", ACCESS))
        assert elsewhere != EpisodeResult(str(old))
        assert await in_time == EpisodeResult(str(old))
        await _until(lambda: not psutil.pid_exists(old))
        await pool.close()

    asyncio.run(scenario())


def test_a_worker_that_retires_ends_after_one_that_hangs_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in time when the worker was retired, and nobody hears of its end."""
    monkeypatch.setattr(harness_pool, "CANCEL_S", 0.5)

    async def scenario() -> None:
        pool = HarnessPool(Agent(function=f"{file}:plain"))
        hang = [asyncio.create_task(pool.play(Task(name, "sleeps", "1000", ACCESS))) for name in "ab"]
        await _until(lambda: len(pool.judging) == 2)
        old = pool.judging[0].pid
        hang[0].cancel()
        elsewhere = await pool.play(Task("c", "pid", "", ACCESS))
        while elsewhere == EpisodeResult(str(old)):
            elsewhere = await pool.play(Task("c", "pid", "", ACCESS))
        hang[1].cancel()
        await _until(lambda: not psutil.pid_exists(old))
        await _until(lambda: not pool.playing)
        await pool.close()

    asyncio.run(scenario())


PROGRAM = """
import json, os, subprocess, sys, time
given = json.loads(sys.stdin.readline())
doing = given["prompt"]
if doing == "tell":
    assert os.environ["OPENAI_BASE_URL"] == given["url"] and os.environ["OPENAI_API_KEY"] == given["key"]
    assert os.environ["ANTHROPIC_BASE_URL"] == given["anthropic_url"] == "http://127.0.0.1:1"
    print(given["answer"])
elif doing == "fail":
    print("no luck", file=sys.stderr)
    sys.exit(4)
elif doing == "family":
    child = subprocess.Popen(["sleep", "1000"])
    with open(given["answer"], "w") as file: file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
elif doing == "leaves":
    subprocess.Popen(["sleep", "1000"])
    print("left")
"""


def test_a_program_for_each_episode(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("python", str(tmp_path / "program.py"))
    episodes = ("tell", "42"), ("fail", ""), ("family", str(tmp_path / "pids")), ("leaves", "")
    found = play(Agent(command=command, timeout_s=3.0), *episodes)
    assert found[0] == EpisodeResult("42")
    assert reasons(found) == ["", "agent_error", "agent_timeout", ""]
    assert isinstance(found[1], RewardFailure)
    assert found[1].message.endswith("exit code 4: no luck")
    assert found[3] == EpisodeResult("left")
    for pid in (tmp_path / "pids").read_text().split():
        _gone(int(pid))


def test_programs_end_with_the_pool(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    pids = tmp_path / "pids"

    async def scenario() -> None:
        pool = HarnessPool(Agent(command=("python", str(tmp_path / "program.py"))))
        playing = asyncio.create_task(pool.play(Task("a", "family", str(pids), ACCESS)))
        await _until(lambda: pids.is_file() and len(pids.read_text().split()) == 2)
        await pool.close()
        assert reasons([await playing]) == ["agent_error"]

    asyncio.run(scenario())
    for pid in pids.read_text().split():
        _gone(int(pid))


def _gone(pid: int) -> None:
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent.function=nowhere:f .*called as f\(prompt: str, answer: str, access"):
        check_function(Agent(function="nowhere:f"))
    with pytest.raises(ConfigError, match=r"agent.command=.*no-such-program"):
        check_function(Agent(command=("no-such-program",)))


@pytest.mark.parametrize(
    "value", [object(), Outcome(reward="x"), Outcome(result=3), Outcome(turn_rewards=(float("nan"),)), float("inf"), {}]  # pyright: ignore[reportArgumentType]
)  # fmt: skip
def test_no_result(value: Any) -> None:
    found = read_outcome(value)
    assert isinstance(found, RewardFailure)
    assert found.reason == "agent_invalid"
