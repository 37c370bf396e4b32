"""The rules that a machine can check: who imports whom, what a bare import loads, which calls are unsafe."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import asyncrl
from asyncrl.renamed_modules import RENAMED

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("asyncrl", "actors", "pipelines")
FILES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
SANDBOX_CHILD = REPOSITORY / "asyncrl" / "sandbox" / "child.py"
"""The one file that executes a text: it runs inside the sandbox."""

UNSAFE = {
    "pickle runs code on load": re.compile(r"\bimport (cloud)?pickle\b|\bfrom (cloud)?pickle\b|\bpickle\.loads?\("),
    "torch.load unpickles": re.compile(r"\btorch\.load\("),
    "shell=True lets a value become a command": re.compile(r"\bshell=True\b"),
    "eval and exec run what they are given": re.compile(r"(?<![\w.])(eval|exec)\("),
    "yaml.load builds any object": re.compile(r"\byaml\.(unsafe_)?load\("),
    "os.system is a shell": re.compile(r"\bos\.(system|popen)\("),
}


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_import_contracts() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "asyncrl, asyncrl.config, asyncrl.types, asyncrl.errors",
        "pipelines.cli",
        "pipelines.compose, pipelines.plan.plan",
    ],
)
def test_light_imports(modules: str, tmp_path: Path) -> None:
    heavy = {"torch", "ray", "vllm", "cupy", "transformers"} | ({"hydra"} if "compose" not in modules else set())
    result = python(f"import sys, {modules}; print(*sorted({heavy!r} & set(sys.modules)))", cwd=tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_the_package_gives_out_its_public_names() -> None:
    assert {name: getattr(asyncrl, name).__module__ for name in ("Pipeline", "Run", "Prompt", "Score", "Drop")} == {
        "Pipeline": "pipelines.pipeline",
        "Run": "asyncrl.config.run",
        "Prompt": "asyncrl.types",
        "Score": "asyncrl.user_code.score",
        "Drop": "asyncrl.user_code.stages",
    }
    with pytest.raises(ImportError, match="nothing_of_ours"):
        from asyncrl import nothing_of_ours  # type: ignore[attr-defined] # noqa: F401


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_of_modules_are_the_modules(old: str, new: str) -> None:
    """What users' files and started cluster jobs import."""
    assert import_module(old) is import_module(new)


def test_old_names_load_nothing_heavy(tmp_path: Path) -> None:
    """In any order: a name below an old one, without the one above it."""
    code = (
        "import sys; from asyncrl.stages.base import Drop; from asyncrl.rewards.score import Score; import asyncrl; "
        "assert (asyncrl.Drop, asyncrl.Score) == (Drop, Score); print(*sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    result = python(code, cwd=tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_a_job_that_was_begun_under_the_old_name_is_followed(tmp_path: Path) -> None:
    """The head node is told by a laptop whose asyncrl may be older, and the other way round."""

    def job(module: str, *words: str) -> str:
        command = [sys.executable, "-m", module, *words]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job("pipelines.cluster_job", "start", "a", "/bin/echo", "said")
    assert job("pipelines.cluster.job", "follow", "a", "MARK") == "MARK\nsaid\n\nMARK 0\n"
    assert job("pipelines.cluster_job", "follow", "a", "MARK") == "MARK\nsaid\n\nMARK 0\n"


def test_no_unsafe_calls() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {why}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for why, pattern in UNSAFE.items()
        if pattern.search(line) and not (path == SANDBOX_CHILD and "exec run" in why)
    ]
    assert not found


def test_unsafe_patterns_see_what_they_should() -> None:
    bad = ["import pickle", "torch.load(p)", "run(c, shell=True)", "eval(x)", "yaml.load(f)", "os.system(c)"]
    fine = ["model.eval()", "msgspec.yaml.decode(x)", "loader.exec_module(m)", "# unpickled", "tree.load(x)"]
    assert all(any(pattern.search(line) for pattern in UNSAFE.values()) for line in bad)
    assert not any(pattern.search(line) for line in fine for pattern in UNSAFE.values())


def test_guard_accepts_this_checkout(tmp_path: Path) -> None:
    result = python("from asyncrl.system import install_guard; install_guard.check()", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_guard_refuses_a_foreign_actors_folder(tmp_path: Path) -> None:
    """`python -c` puts the current directory first on the path, as Ray does for its workers."""
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").touch()
    result = python("from asyncrl.system import install_guard; install_guard.check()", cwd=tmp_path)
    assert result.returncode == 1
    assert f"actors from {tmp_path.resolve()}" in result.stderr
    assert "must come from one place" in result.stderr


def test_guard_stops_the_command(tmp_path: Path) -> None:
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").touch()
    result = python("from pipelines.cli import main; raise SystemExit(main(['plan']))", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("asyncrl: asyncrl, actors and pipelines must come from one place")
    assert "Traceback" not in result.stderr
