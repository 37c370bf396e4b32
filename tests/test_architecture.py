"""The rules that a machine can check: who imports whom, what a bare import loads, which calls are unsafe."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
