"""S4, S5, S7, S8, S10 and S12: what is refused, by name, without being run, and the same under `python -O`."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.config import Run, load
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.vllm import environment
from asyncrl.errors import ConfigError, MissingDependencyError
from asyncrl.models import checkpoint
from asyncrl.system import minimum_versions
from asyncrl.system.run_directory import Events, RunDirectory, replace
from pipelines.cli import main
from pipelines.compose import to_yaml
from pipelines.recording.compare import compare
from tests.security import hostile

REPOSITORY = Path(__file__).parents[2]
UNSAFE = {
    "S301": "import pickle\npickle.loads(b'')\n",
    "S602": "import subprocess\nsubprocess.run('x', shell=True)\n",
    "S506": "import yaml\nyaml.load('x', Loader=yaml.Loader)\n",
    "S307": "eval('x')\n",
    "S102": "exec('x')\n",
    "S104": "import socket\nsocket.socket().bind(('0.0.0.0', 1))\n",
    "S605": "import os\nos.system('x')\n",
}
EXPECTED = {
    "pickled weights": "CheckpointError",
    "weights that are a pickle": "CheckpointError",
    "index that points elsewhere": "no .safetensors file beside it",
    "index that names a pickle": "no .safetensors file beside it",
    "extension type": "column 'reward' is of an extension type",
    "_target_ in a config": "engine._target_ is refused",
    "_target_ among free options": "task.options.inner[0]._target_ is refused",
    "_target_ as an override": "reward._target_ is refused",
    "Hydra's own launcher": "ConfigError",
    "Hydra's search path": "Hydra itself cannot be configured here",
    "a tag that builds objects": "is not YAML",
    "trust_remote_code": "engine.trust_remote_code is refused",
    "insecure serialization": "VLLM_ALLOW_INSECURE_SERIALIZATION=1 is set",
    "development endpoints": "VLLM_SERVER_DEV_MODE=1 is set",
    "a frame of 4 GiB": "CorruptSegmentError",
    "a name that leaves the root": "must be a plain directory name",
}


def ruff(*words: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [Path(sys.executable).with_name("ruff"), "check", "--no-cache", *words]
    return subprocess.run(command, cwd=REPOSITORY, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_s4_no_unsafe_call_in_the_code() -> None:
    """Not even one that a comment hides from the linter. (torch.load: test_architecture.)"""
    lines = ruff("--ignore-noqa", "--output-format", "concise", "asyncrl", "actors", "pipelines").stdout.splitlines()
    assert lines
    assert [line for line in lines if re.search(r": S\d{3} ", line)] == []


@pytest.mark.parametrize("rule", UNSAFE)
def test_s4_the_linter_would_see_one(rule: str) -> None:
    assert rule in ruff("--stdin-filename", "asyncrl/new.py", "-", stdin=UNSAFE[rule]).stdout


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def refusals(attacked: Path) -> dict[str, str]:
    return named(hostile.outcomes(chain(hostile.cases(attacked), hostile.models(attacked))), attacked)


def named(lines: Iterable[str], directory: Path) -> dict[str, str]:
    found = (line.replace(str(directory), "DIRECTORY").partition(": ") for line in lines)
    return {name: text for name, _, text in found}


def test_s4_optimised_python_refuses_the_same(refusals: dict[str, str], tmp_path: Path) -> None:
    """`python -O` leaves out every `assert`: none stands guard."""
    words = [sys.executable, "-O", "-m", "tests.security.hostile", str(tmp_path)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=True)
    found = named(done.stdout.splitlines(), tmp_path)
    assert len(found) > 10
    assert found == {name: refusals[name] for name in found}
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(Path(checkpoint.__file__).read_text())))


def test_s5_hostile_files_are_refused_and_nothing_runs(refusals: dict[str, str], attacked: Path) -> None:
    assert refusals.keys() == EXPECTED.keys()
    assert {name: text for name, text in refusals.items() if EXPECTED[name] not in text} == {}
    canary = attacked / "canary"
    assert not canary.exists()
    pickle.loads(pickle.dumps(hostile.Bomb(canary)))
    assert canary.exists()  # so it would have shown


def test_s7_a_link_in_a_foreign_run_directory_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    directory = RunDirectory(tmp_path)
    (tmp_path / ".summary.json.partial").symlink_to(precious)
    directory.events.symlink_to(precious)
    replace(directory.summary, b"{}")
    with pytest.raises(OSError, match="symbolic link"):
        Events(directory.events, 1 << 20)
    assert precious.read_text() == "mine"
    assert not directory.summary.is_symlink()


def test_s7_a_run_that_was_copied_is_closed_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    RunDirectory(tmp_path).close_to_others()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", environment.DOORS)
def test_s8_doors_of_vllm_open_by_name_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert [problem.partition(" ")[0] for problem in environment.problems(VllmEngine())] == [f"{name}=1"]
    opened = load({"engine": {"type": "vllm", "allow_unsafe": [name]}})
    assert isinstance(opened.engine, VllmEngine)
    assert list(environment.problems(opened.engine)) == []
    with pytest.raises(ConfigError, match=r"engine.allow_unsafe\[0\]"):
        load({"engine": {"type": "vllm", "allow_unsafe": ["everything"]}})


def test_s10_a_page_shows_text_and_loads_nothing(tmp_path: Path) -> None:
    """Names, settings and errors are text of others: a model's answer can end up in an error."""
    script = "<script>alert(1)</script><img src=https://example.org/x onerror=alert(2)>"
    for name in ("one", "<b>two"):
        run = Run(
            name=name,
            model=msgspec.convert({"type": "checkpoint", "path": script + name}, type=Run.__annotations__["model"]),
        )
        directory = RunDirectory.create(tmp_path / name)
        replace(directory.config, to_yaml(run).encode())
        replace(directory.summary, msgspec.json.encode({"status": "failed", "error": script}))
        pq.write_table(
            pa.table({"step": [0, 1], "reward": [0.0, 1.0], script.replace("/", ""): [1.0, 2.0]}), directory.metrics
        )
    page = tmp_path / "page.html"
    compare([tmp_path / "one", tmp_path / "<b>two"], Console(quiet=True), out=page)
    text = page.read_text()
    # What the browser parses: everything but plotly's own code, in which `</script>` cannot occur.
    pieces = text.split("</script>")
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "<b>two" not in "".join(piece.partition("<script")[0] for piece in pieces)
    assert not any(
        f'{attribute}="http' in piece.partition("<script")[0] for piece in pieces for attribute in ("src", "href")
    )
    assert "<script src" not in text
    assert "<link" not in "".join(piece.partition("<script")[0] for piece in pieces)


def test_s12_versions_below_a_floor_stop_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(minimum_versions.problems()) == []
    for name, floor in minimum_versions.MINIMUM_VERSIONS.items():
        assert minimum_versions.release(version(name)) >= minimum_versions.release(floor.oldest)
    monkeypatch.setattr(minimum_versions, "version", {"ray": "2.54.0", "torch": "2.5.1+cpu"}.get)
    monkeypatch.setattr(
        minimum_versions,
        "MINIMUM_VERSIONS",
        {name: minimum_versions.MINIMUM_VERSIONS[name] for name in ("ray", "torch")},
    )
    with pytest.raises(MissingDependencyError):
        minimum_versions.check()
    assert main(["plan"]) == 2
    said = capsys.readouterr().err
    assert "ray 2.54.0 is too old to be safe" in said
    assert "pip install 'ray>=2.59'" in said
    assert "pip install 'torch>=2.6'" in said


def test_s12_versions_are_compared_as_numbers() -> None:
    assert minimum_versions.release("14.0.1") > minimum_versions.release("9.0.0")
    assert minimum_versions.release("2.13.0+cpu") == (2, 13, 0)
    assert minimum_versions.release("2.60.0rc1") == (2, 60, 0)
