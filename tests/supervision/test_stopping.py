"""Runs that are asked to end, or lose what they stand on: real processes, real signals."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.config import Run
from asyncrl.errors import StallError, StoppedError
from asyncrl.system import ownership
from pipelines.supervision.stopping import SAME_S, Stopping

COMMAND = str(Path(sys.executable).with_name("asyncrl"))
SMALL = (
    "experiment=quickstart", "model=checkpoint", "name=run", "flow.groups_per_step=4", "flow.groups_per_take=1",
    "rollout.group_size=4", "rollout.max_tokens=24", "evaluation.prompts=0",
)  # fmt: skip
ENDLESS = "steps=100000"
AGENTS = ("DashboardAgent", "RuntimeEnvAgent")
"""Of Ray, beside its nodes: the raylet ends with each of them."""
EARLIER = (("gcs_server", 0.0), ("gcs_server", 1.5), ("raylet", 0.0))
"""What of Ray is lost while it starts, and how many seconds after it has begun."""


def start(root: Path, model: Path, *overrides: str) -> "subprocess.Popen[str]":
    return command(root, "run", *SMALL, f"model.path={model}", f"root={root}", *overrides)


def command(root: Path, *words: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ASYNCRL_TEST": str(root)}
    with (root / "out").open("a") as out, (root / "err").open("a") as err:
        return subprocess.Popen([COMMAND, *words], stdout=out, stderr=err, text=True, env=environment)


def until(found: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps_done(root: Path) -> int:
    events = root / "run" / "events.jsonl"
    return events.read_text().count('"kind":"update"') if events.exists() else 0


def last_words(root: Path) -> str:
    """Behind them, a driver that ends may have lines of Ray's own log, with a date and a line of its source."""
    lines = (root / "err").read_text().strip().splitlines()
    return [line for line in lines if not re.match(r"\[\d{4}-\d\d-\d\d .*\.cc:\d+: ", line)][-1]


def finishes(root: Path, steps: int) -> None:
    """The run goes on to its end, and its directory is sound. It is resumed with fewer steps than it was to have."""
    config = root / "run" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 100000", f"steps: {steps}"))
    assert command(root, "resume", str(root / "run")).wait(timeout=240) == 0, (root / "err").read_text()
    assert json.loads((root / "run" / "summary.json").read_text())["status"] == "ok"
    assert command(root, "check", str(root / "run")).wait(timeout=60) == 0
    assert "verdict     sound" in (root / "out").read_text()


def descendants(root: Path) -> list[psutil.Process]:
    """By their environment, and their children: Ray's agents write their titles over theirs."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("ASYNCRL_TEST") == str(root):
                found |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("number", "everyone"),
    [
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        (signal.SIGTERM, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step(
    number: signal.Signals, everyone: bool, tmp_path: Path, model: Path
) -> None:
    """`everyone`: every process gets it, as from a service manager; the run then gets the supervisor's, too."""
    process = start(tmp_path, model, ENDLESS, "cluster=inprocess", "checkpoint.every=1000")
    until(lambda: steps_done(tmp_path) > 2, process)
    children = psutil.Process(process.pid).children(recursive=True) if everyone else []
    for each in (process, *children):
        each.send_signal(number)
    assert process.wait(timeout=40) == StoppedError.exit_code
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    done = int(saved.name.removeprefix("step-"))
    assert done == steps_done(tmp_path)
    said = f"stopped by {number.name} with a checkpoint of step {done}; continue with: asyncrl resume {tmp_path}/run"
    assert last_words(tmp_path) == f"asyncrl: {said}"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["steps"]) == ("interrupted", f"StoppedError: {said}", done)
    finishes(tmp_path, done + 2)
    assert steps_done(tmp_path) == done + 2, "no step was taken twice"


@pytest.mark.slow
def test_a_second_start_is_refused_before_it_changes_a_byte(tmp_path: Path, model: Path) -> None:
    """A run that waits for its trainer, so that its own files stay as they are."""
    hanging = tmp_path / "mine.py"
    hanging.write_text("import time\n\ndef loss(*arguments, **more):\n    time.sleep(1000)\n")
    own = ("algorithm=custom", f"algorithm.function={hanging}:loss", "cluster=inprocess", "recovery.grace_s=1")
    process = start(tmp_path, model, ENDLESS, *own)
    until(lambda: (tmp_path / "run" / "config.yaml").exists(), process)
    time.sleep(3)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for words in (("resume", str(tmp_path / "run")), ("resume", str(tmp_path / "run"), "trainer.lr=1")):
        assert command(tmp_path, *words).wait(timeout=60) == 2
        assert last_words(tmp_path).startswith(f"asyncrl: {tmp_path}/run is in use by another process: wait until")
    assert before.keys() <= {path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    same = {path for path, content in before.items() if path.read_bytes() == content}
    assert {path.name for path in before.keys() - same} <= {"events.jsonl"}, "but for what the run itself writes"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == StoppedError.exit_code


def test_a_second_signal_ends_it_at_once(tmp_path: Path, model: Path) -> None:
    hanging, mark = tmp_path / "mine.py", tmp_path / "hangs"
    hanging.write_text(
        f"import time\n\ndef loss(*arguments, **more):\n    open({str(mark)!r}, 'w').close()\n    time.sleep(1000)\n"
    )
    own = ("algorithm=custom", f"algorithm.function={hanging}:loss", "cluster=inprocess", "recovery.grace_s=300")
    process = start(tmp_path, model, ENDLESS, *own)
    until(mark.exists, process)
    process.send_signal(signal.SIGTERM)
    until(lambda: "a second signal ends it at once" in (tmp_path / "out").read_text(), process)
    time.sleep(SAME_S + 0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    assert last_words(tmp_path) == "asyncrl: ended at once by a second signal, SIGTERM"


def test_work_is_cancelled_by_a_signal_and_not_begun_after_one() -> None:
    said, ended = list[str](), list[str]()

    async def waiting() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def run(stopping: Stopping) -> None:
        assert await stopping.unless(asyncio.sleep(0, "before")) == "before"
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError, match="SIGTERM"):
            await stopping.unless(waiting())
        with pytest.raises(StoppedError):
            await stopping.unless(waiting())

    async def earlier(stopping: Stopping) -> None:
        assert await stopping.unless(asyncio.sleep(0, "earlier")) == "earlier"

    stopping = Stopping(Run(), said.append, said.append)
    with stopping.listening():
        asyncio.run(stopping.during(earlier(stopping)))  # an attempt that another one follows, in a loop of its own
        asyncio.run(stopping.during(run(stopping)))
    assert ended == ["cancelled"]
    assert stopping.explains(KeyboardInterrupt())
    assert not stopping.explains(OSError())
    assert len(said) == 1


def test_neither_the_same_signal_again_nor_the_first_after_a_drain_is_a_second_one() -> None:
    said, left = list[str](), list[str]()

    async def twice(stopping: Stopping) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        with pytest.raises(StoppedError, match="SIGTERM"):
            await stopping.unless(asyncio.sleep(60))

    async def drained(stopping: Stopping) -> None:
        stopping.ask("a drain")
        await asyncio.sleep(SAME_S + 0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError, match="a drain"):
            await stopping.unless(asyncio.sleep(60))

    for scenario in (twice, drained):
        stopping = Stopping(Run(), said.append, left.append)
        with stopping.listening():
            asyncio.run(stopping.during(scenario(stopping)))
    assert [text.partition(":")[0] for text in said] == ["SIGTERM", "SIGTERM", "a drain", "SIGTERM"]
    assert not left


LEAVING = {
    "stopping": "Stopping(Run(), print, full).ask('a drain', within_s=0)",
    "watchdog": "watchdog().end(Explanation('it hangs', (), ()), hopeless=True)",
}


@pytest.mark.parametrize(("who", "code"), [("stopping", StoppedError.exit_code), ("watchdog", StallError.exit_code)])
def test_a_process_that_has_to_go_goes_on_a_full_disk_too(who: str, code: int, tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from asyncrl.config import Run
from asyncrl.observe.diagnosis.snapshot import Explanation
from asyncrl.system.run_directory import RunDirectory
from pipelines.supervision.stopping import Stopping
from pipelines.supervision.watchdog import Watchdog

def full(*_):
    raise OSError(28, "No space left on device")

def watchdog():
    return Watchdog(Run(), RunDirectory(Path({str(tmp_path)!r})), print, print, full)

{LEAVING[who]}
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    assert "the end could not be recorded: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_signals_after_the_end_of_a_run_change_nothing() -> None:
    """While the command waits for what the run has left behind: an impatient Ctrl-C."""
    script = """
import subprocess, sys
from pipelines.supervision.supervisor import supervise

def run():
    subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return 7

sys.exit(supervise(run, lambda path: 1))
"""
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        command = psutil.Process(process.pid)
        until(lambda: bool(command.children()), process)
        until(lambda: not command.children(), process)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.1)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (7, "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_in_a_warm_start_ends_the_run_and_the_next_attempt_makes_the_model(tmp_path: Path) -> None:
    short = [word for word in SMALL if not word.startswith("model=")]
    process = command(tmp_path, "run", *short, "model.steps=300", f"root={tmp_path}", ENDLESS, "cluster=inprocess")
    until((tmp_path / "run" / ".model.partial" / "tokenizer.json").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == StoppedError.exit_code
    said = f"asyncrl: stopped by SIGTERM before its first checkpoint; continue with: asyncrl resume {tmp_path}/run"
    assert last_words(tmp_path) == said
    assert not (tmp_path / "run" / "model").exists()
    finishes(tmp_path, 2)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "moment", [each if each % 10 == 2 else pytest.param(each, marks=pytest.mark.nightly) for each in range(20)]
)
def test_sigterm_at_any_moment_on_ray(moment: int, tmp_path: Path, model: Path) -> None:
    """From start-up to many steps later, with a checkpoint, a publication or an evaluation every few steps."""
    process = start(
        tmp_path, model, ENDLESS, "cluster=local", "checkpoint.every=3", "evaluation.every=4", "evaluation.prompts=8"
    )
    if moment < 7:
        time.sleep(0.4 + 1.7 * moment)
    else:
        until(lambda: steps_done(tmp_path) >= moment - 6, process)
        time.sleep(0.037 * moment)
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=45)
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said
    assert "***" not in said, "no stack of Ray"
    if not (tmp_path / "run" / "config.yaml").exists():  # it had not begun, or even had no handlers of signals yet
        assert code in (128 + signal.SIGTERM, 130, -signal.SIGTERM)
        return
    assert code == StoppedError.exit_code, said
    done, saved = steps_done(tmp_path), sorted((tmp_path / "run").glob("checkpoints/step-*"))
    assert f"step-{done}" in {each.name for each in saved} if done else not saved
    assert not descendants(tmp_path)
    finishes(tmp_path, done + 2)
    assert steps_done(tmp_path) == done + 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "victim", ["gcs_server", "raylet", *(pytest.param(agent, marks=pytest.mark.nightly) for agent in AGENTS)]
)
def test_a_run_that_loses_ray_goes_on_with_another(victim: str, tmp_path: Path, model: Path) -> None:
    process = start(tmp_path, model, "steps=12", "cluster=local", "checkpoint.every=2")
    until(lambda: steps_done(tmp_path) > 3, process)
    found = [each for each in descendants(tmp_path) if victim in " ".join(each.cmdline()[:3])]
    assert found
    for each in found:
        each.kill()
    assert process.wait(timeout=240) == 0, (tmp_path / "err").read_text()
    assert "restart 1 of 3, recovery.max_restarts" in (tmp_path / "out").read_text()
    assert not descendants(tmp_path)
    assert command(tmp_path, "check", str(tmp_path / "run")).wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "delay_s"),
    [("raylet", 6.0), *(pytest.param(*each, marks=pytest.mark.nightly) for each in EARLIER)],
)
def test_ray_that_is_lost_at_the_start_ends_the_command_soon_and_with_a_sentence(
    victim: str, delay_s: float, tmp_path: Path, model: Path
) -> None:
    """So long after the process has begun: while Ray starts, or actors are placed. A driver that Ray has not let in
    yet is ended by Ray itself, after a minute."""
    process = start(tmp_path, model, ENDLESS, "cluster=local", "recovery.max_restarts=0")
    found: list[psutil.Process] = []

    def begun() -> bool:
        found.extend(each for each in descendants(tmp_path) if _is(each, victim))
        return bool(found)

    until(begun, process)
    time.sleep(delay_s)
    found[0].kill()
    killed = time.monotonic()
    assert process.wait(timeout=150) == 11, (tmp_path / "err").read_text()
    assert time.monotonic() - killed < 90
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said
    assert last_words(tmp_path).startswith(
        ("asyncrl: Ray", "asyncrl: the run's process ended with code 1; continue with")
    )
    assert not descendants(tmp_path)
    finishes(tmp_path, 2)


def _is(process: psutil.Process, name: str) -> bool:
    try:
        return process.name() == name
    except psutil.Error:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_may_not_start_again_says_what_died(tmp_path: Path, model: Path) -> None:
    process = start(tmp_path, model, ENDLESS, "cluster=local", "checkpoint.every=1", "recovery.max_restarts=0")
    until(lambda: steps_done(tmp_path) > 1, process)
    (server,) = [each for each in descendants(tmp_path) if each.name() == "gcs_server"]
    server.kill()
    assert process.wait(timeout=60) == 11
    said = f"asyncrl: Ray's control process ({server.pid}) died, and with it everything that runs on Ray; "
    assert said + f"continue with: asyncrl resume {tmp_path}/run" in (tmp_path / "err").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_outlives_a_command_that_was_killed(tmp_path: Path, model: Path) -> None:
    process = start(tmp_path, model, ENDLESS, "cluster=local", "checkpoint.every=1")
    until(lambda: steps_done(tmp_path) > 1, process)
    assert len(descendants(tmp_path)) > 6
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while left := descendants(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    finishes(tmp_path, 8)


def test_what_dead_owners_leave_behind_is_found(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys; from asyncrl.system import ownership; "
        "os.environ[ownership.MARK] = ownership.mark(); "
        "shell = ['sh', '-c', 'env -i sleep 300 & wait']; "  # its child has no mark
        "print(subprocess.Popen(shell, stdout=subprocess.DEVNULL).pid, flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert pid not in {each.pid for each in ownership.left_behind()}, "its owner lives"
        owner.kill()
    (child,) = psutil.Process(pid).children()
    left = [each for each in ownership.left_behind() if each.pid in {pid, child.pid}]
    assert ownership.end(left) == 2
    assert not psutil.pid_exists(pid)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
