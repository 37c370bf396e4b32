"""What a plain run prints first is ours: libraries keep their deprecations, hints and progress bars to themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.system import minimum_versions
from tests.support import needs, quickstart_runs

WARNS = """
import warnings
from asyncrl.system.quiet import quieten
quieten()
for kind, module in ((DeprecationWarning, "__main__"), (FutureWarning, "torch.nn"), (UserWarning, "ray._private"),
                     (UserWarning, "hydra"), (UserWarning, "mine"), (RuntimeWarning, "torch")):
    warnings.warn_explicit(f"{kind.__name__} of {module}", kind, "file.py", 1, module=module)
"""


def _warned(script: str, **environment: str) -> set[str]:
    without = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=without | environment, capture_output=True, text=True, timeout=60, check=True)
    return {line.partition(": ")[2].partition(": ")[2] for line in done.stderr.splitlines()}


def test_libraries_are_quiet_unless_asked_and_the_users_code_is_heard() -> None:
    users = {"UserWarning of mine", "RuntimeWarning of torch"}
    assert _warned(WARNS) == users
    everything = _warned(WARNS, ASYNCRL_VERBOSE="1")
    assert users | {"FutureWarning of torch.nn", "UserWarning of hydra", "UserWarning of ray._private"} <= everything


def test_processes_inherit_the_quiet() -> None:
    child = "import subprocess, sys\n" + WARNS + "subprocess.run([sys.executable, '-c', CHILD])\n"
    child = child.replace("CHILD", repr("import warnings; warnings.warn('late', FutureWarning)"))
    assert "late" not in _warned(child)
    assert "late" in _warned(child, ASYNCRL_VERBOSE="1")


def _plain(root: Path, model: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    words = quickstart_runs.command(root, model, "cluster=local", "steps=2", *overrides)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_a_plain_run_prints_nothing_that_is_not_ours(tmp_path: Path, model: Path) -> None:
    done = _plain(tmp_path, model)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == f"run directory {tmp_path}/run"
    assert "Warning" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(minimum_versions.vllm_problem(minimum_versions.vllm_installed()) is not None, reason=needs.VLLM)
def test_neither_does_one_with_vllm(tmp_path: Path, model: Path) -> None:
    done = _plain(tmp_path, model, "engine=vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == f"run directory {tmp_path}/run"
    assert "WARNING" not in done.stdout


def test_a_refused_run_prints_its_sentence_alone(tmp_path: Path, model: Path) -> None:
    words = quickstart_runs.command(tmp_path, model, "trainer.learning_rate=1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("asyncrl: unknown key trainer.learning_rate")
    assert len(done.stderr.splitlines()) == 1
