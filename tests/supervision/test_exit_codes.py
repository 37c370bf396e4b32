"""How a run that cannot go on ends, as its caller sees it: the code, one sentence, and what lies in its directory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl import errors
from asyncrl.errors import AsyncRLError, StallError
from tests.support.command import asyncrl

COMMAND = str(Path(sys.executable).with_name("asyncrl"))
DOCS = Path(__file__).parents[2] / "docs" / "commands.md"
SMALL = (
    "experiment=quickstart", "model=checkpoint", "name=run", "steps=100000", "flow.groups_per_step=4",
    "flow.groups_per_take=1", "rollout.group_size=4", "rollout.max_tokens=24", "evaluation.prompts=0",
)  # fmt: skip
HANGING_LOSS = """
import time

def loss(*arguments, **more):
    while True:
        time.sleep(0.1)
"""


THREAD_THAT_STAYS = """
import asyncio, time

held = []

def loss(tokens):
    if not held:
        held.append(asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000))
    return -tokens.advantage_L * tokens.ratio
"""


def _start(root: Path, model: Path, *overrides: str) -> "subprocess.Popen[str]":
    words = [COMMAND, "run", *SMALL, f"model.path={model}", f"root={root}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ASYNCRL_TEST": str(root)}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment)


def _processes(root: Path, kind: bytes) -> list[int]:
    """Those that descend from the run, by a variable in their environment."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            ours = process.name.isdigit() and f"ASYNCRL_TEST={root}".encode() in (process / "environ").read_bytes()
            if ours and (process / "cmdline").read_bytes().startswith(kind):
                found.append(int(process.name))
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return found


def _until_the_first_checkpoint(root: Path, process: "subprocess.Popen[str]") -> float:
    """Returns when that had to be there."""
    deadline = time.monotonic() + 120
    while not (root / "run" / "checkpoints" / "step-1").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return deadline


def _check(root: Path, code: int, error: str, sentence: str) -> None:
    assert code == StallError.exit_code, error
    said = error.strip().splitlines()[-1]
    assert re.fullmatch(f"asyncrl: {sentence}.*", said), error
    written = json.loads((root / "run" / "stall.json").read_text())
    assert said == f"asyncrl: {written['sentence']}; stacks are in {root / 'run' / 'stall.txt'}"
    assert written["exit_code"] == code
    assert (root / "run" / "stall.txt").read_text().startswith(written["sentence"])
    summary = json.loads((root / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"] == said.replace("asyncrl", "StallError", 1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_process_on_ray_ends_the_run_and_is_not_left_behind(tmp_path: Path, model: Path) -> None:
    process = _start(tmp_path, model, "cluster=local", "flow.stall_timeout_s=12", "checkpoint.every=1")
    deadline = _until_the_first_checkpoint(tmp_path, process)
    (buffer,) = _processes(tmp_path, b"ray::BufferActor")
    os.kill(buffer, signal.SIGSTOP)
    _, error = process.communicate(timeout=90)
    _check(tmp_path, process.returncode, error, "t.* buffer.* is stopped \\(SIGSTOP\\) and has not answered for \\d+ s")
    while _processes(tmp_path, b"ray::BufferActor"):
        assert time.monotonic() < deadline + 60, "the buffer outlives its run"
        time.sleep(0.1)


@pytest.mark.timeout(200)
def test_an_event_loop_that_hangs_is_ended_from_outside(tmp_path: Path, model: Path) -> None:
    """Every actor shares it here, so nothing can be told to stop."""
    file = tmp_path / "mine.py"
    file.write_text(HANGING_LOSS)
    own = ("algorithm=custom", f"algorithm.function={file}:loss", "cluster=inprocess", "flow.stall_timeout_s=6")
    process = _start(tmp_path, model, *own)
    output, error = process.communicate(timeout=120)
    assert "who waits for whom" in output
    assert "mine.py" not in output + error.replace(str(file), ""), "stacks are in the file alone"
    _check(
        tmp_path,
        process.returncode,
        error,
        "the run waits for the trainer to do a forward and backward: it has been at it for \\d+ s "
        "\\(forward and backward for step 0\\) and takes nothing else meanwhile",
    )
    assert "mine.py" in (tmp_path / "run" / "stall.txt").read_text()


def test_an_interrupted_run_that_will_not_end_is_ended(tmp_path: Path, model: Path) -> None:
    """As a thread of somebody's library would keep it, for which Python waits without end."""
    file = tmp_path / "mine.py"
    file.write_text(THREAD_THAT_STAYS)
    own = ("algorithm=custom", f"algorithm.function={file}:loss", "cluster=inprocess", "checkpoint.every=1")
    process = _start(tmp_path, model, *own, "recovery.grace_s=5")
    _until_the_first_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 10, error
    assert error.strip().splitlines()[-1] == "asyncrl: SIGINT: not everything ended within recovery.grace_s=5"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_prompts_that_are_none_are_said_to_be_none(tmp_path: Path, model: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n\n")
    own = ("task=jsonl", f"task.path={tmp_path}/prompts.jsonl", "cluster=inprocess")
    done = asyncrl("run", *SMALL, f"model.path={model}", f"root={tmp_path}", *own)
    assert done.code == 2
    assert "prompts.jsonl holds no prompt; write one JSON object with `prompt` per line" in done.err


def test_the_documented_codes_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*)\|$", DOCS.read_text(), re.MULTILINE)
    documented = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+Error)`", names)}
    classes = [found for found in vars(errors).values() if isinstance(found, type) and found is not AsyncRLError]
    assert documented == {found.__name__: found.exit_code for found in classes if issubclass(found, AsyncRLError)}
    assert {"0", "1", "130"} <= {code for code, _ in rows}
