"""Small real runs of the quickstart task: in this process, or in one of their own where they are killed or watched."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.compose import from_yaml
from tests.support.command import asyncrl

COMMAND = str(Path(sys.executable).with_name("asyncrl"))
SMALL = (
    "experiment=quickstart",
    "model=checkpoint",
    "cluster=inprocess",
    "steps=4",
    "flow.groups_per_step=4",
    "flow.groups_per_take=1",
    "rollout.group_size=4",
    "evaluation.prompts=16",
    "checkpoint.every=1",
    "checkpoint.keep=100",
)
"""A run of a few seconds."""


def command(root: Path, model: Path, *overrides: str) -> list[str]:
    return [COMMAND, "run", *SMALL, f"model.path={model}", f"root={root}", "name=run", *overrides]


def run(root: Path, model: Path, *overrides: str) -> str:
    """To its end; what it printed."""
    return _succeeded(*command(root, model, *overrides)[1:])


def resume(directory: Path) -> str:
    """On Ray in a process of its own: Ray reads whom it lets in when it is imported, and others import it here."""
    if from_yaml(directory / "config.yaml").cluster != "inprocess":
        return finish(start_resume(directory), timeout=200)
    return _succeeded("resume", str(directory))


def _succeeded(*words: str) -> str:
    done = asyncrl(*words)
    assert done.code == 0, done.out + done.err
    return done.out + done.err


def start(root: Path, model: Path, *overrides: str) -> "subprocess.Popen[str]":
    return _start(command(root, model, *overrides))


def _start(words: list[str]) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: "subprocess.Popen[str]", *, timeout: float = 100) -> str:
    """Wait for a success; a failure shows what the run printed."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def start_resume(directory: Path) -> "subprocess.Popen[str]":
    return _start([COMMAND, "resume", str(directory)])


def summary(root: Path) -> dict[str, Any]:
    return json.loads((root / "run" / "summary.json").read_text())


def kill_after_step(process: "subprocess.Popen[str]", root: Path, step: int) -> None:
    """SIGKILL the driver once the checkpoint after `step` is there: somewhere inside a later step."""
    await_step(process, root, step)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def await_step(process: "subprocess.Popen[str]", root: Path, step: int) -> None:
    """Until the checkpoint after `step` is there."""
    wanted = root / "run" / "checkpoints" / f"step-{step}"
    deadline = time.monotonic() + 180
    while not wanted.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{wanted} did not appear"
        time.sleep(0.01)
