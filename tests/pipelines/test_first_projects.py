"""What a new user begins with runs as it is: `asyncrl run` alone, `asyncrl init`, the notebook, an installed wheel."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support import quickstart_runs
from tests.support.command import asyncrl

ROOT = Path(__file__).parents[2]
QUICK = ("cluster=inprocess", "steps=2", "flow.groups_per_step=4", "flow.groups_per_take=1", "evaluation.prompts=4")


def test_run_without_settings_says_how_to_begin() -> None:
    done = asyncrl("run")
    assert done.code == 2
    assert done.err.startswith("asyncrl: nothing to run yet: `asyncrl run` takes settings as key=value")
    assert "asyncrl run experiment=quickstart name=first" in done.err
    assert "asyncrl init my-project" in done.err
    assert "reward.function=reward.py:reward name=mine" in done.err


@pytest.mark.slow
def test_the_project_that_init_writes_runs_from_anywhere(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    done = asyncrl("init", project)
    assert done.code == 0, done.err
    assert sorted(path.name for path in project.iterdir()) == [
        "README.md",
        "model",
        "prompts.jsonl",
        "reward.py",
        "run.sh",
    ]
    environment = os.environ | {"PATH": f"{Path(quickstart_runs.COMMAND).parent}:{os.environ['PATH']}", "NAME": "first"}
    for command, said in (("plan", "nothing stands in its way"), ("run", "ok: 2 steps")):
        done = subprocess.run(
            [project / "run.sh", *QUICK], cwd=tmp_path, env=environment | {"COMMAND": command},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
        assert "(the reference): 1.2, of right=1, begins_right=0.2" in done.stdout
    assert asyncrl("report", project / "runs" / "first").code == 0
    assert asyncrl("init", project).code == 2


@pytest.mark.slow
def test_the_notebook_goes_from_prompts_to_report(tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "from_prompts_to_report.ipynb"
    shorter = json.loads(notebook.read_text())
    assert all(not cell.get("outputs") for cell in shorter["cells"]), "it is kept without outputs"
    script = Path(__file__).with_name("execute_notebook.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(notebook)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert "a3b-21c+12$" in shown[1][0]["text/plain"]
    assert "right=1" in str(shown[3])
    assert "20 steps" in str(shown[4])
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


def test_the_extras_that_pages_name_are_there() -> None:
    known = set(distribution("asyncrl").metadata.get_all("Provides-Extra") or ())
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").iterdir()]
    named = {
        extra
        for page in pages
        if page.is_file()
        for extras in re.findall(r"pip install[^\n`]*(?:asyncrl|\.)\[([\w,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert named
    assert named <= known


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the commands of an environment with the wheel, and with what it needs from this one."""
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("asyncrl", "actors", "pipelines", "configs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    _do(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(place), str(tree))
    shutil.rmtree(tree)
    (wheel,) = place.glob("asyncrl-*.whl")
    _do(sys.executable, "-m", "venv", "--without-pip", str(place / "fresh"))
    fresh = place / "fresh" / "bin"
    _do(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(fresh / "python"),
        "install",
        *offline[::3],
        "--no-deps",
        str(wheel),
    )
    # Its own packages come first, and the links of editable installations in other directories are not followed.
    (site,) = (place / "fresh" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


def _do(*words: str, cwd: Path | None = None) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, cwd=cwd, env=outside, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_from_any_directory(tmp_path: Path, installed: Path, model: Path) -> None:
    command = str(installed / "asyncrl")
    places = "import asyncrl, pipelines; print(asyncrl.__file__, pipelines.__file__)"
    where = _do(str(installed / "python"), "-c", places, cwd=tmp_path)
    assert all(path.startswith(str(installed.parent)) for path in where.split())
    judge = tmp_path / "mine.py"
    judge.write_text("def reward(prompt, completion, answer):\n    return float(len(completion) % 2)\n")
    settings = ("experiment=quickstart", "model=checkpoint", f"model.path={model}", "reward.function=mine.py:reward")
    plan = _do(command, "plan", *settings, *QUICK, "algorithm=dapo", "correction=cautious_tis", cwd=tmp_path)
    assert "nothing stands in its way" in plan
    assert "ok: 2 steps" in _do(command, "run", *settings, *QUICK, "name=run", cwd=tmp_path)
    _do(command, "report", "runs/run", cwd=tmp_path)
    assert "<script" in (tmp_path / "runs" / "run" / "report.html").read_text()
    assert "reward" in _do(command, "query", "runs/run", "reward_by_step", cwd=tmp_path)
    assert "samples" in _do(command, "simulate", *settings, "--profile", "gb200_8b", "--steps", "5", cwd=tmp_path)
    _do(command, "check", "runs/run", cwd=tmp_path)


def test_an_init_that_is_interrupted_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    project, scratch = tmp_path / "project", tmp_path / ".project.partial"
    (scratch / "left by a kill -9").mkdir(parents=True)
    process = subprocess.Popen(
        [quickstart_runs.COMMAND, "init", project], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while not (scratch / "model").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "asyncrl: interrupted\n")
    assert list(tmp_path.iterdir()) == []
