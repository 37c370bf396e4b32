"""Every command that README.md and docs/ show works. It is run as it stands, in the order of its page and with settings
added that make it short. What takes a GPU, a cluster, minutes or a network is read by the program that it is for."""

import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from pipelines.cli import main
from pipelines.cli.parser import parse
from tests.support import needs
from tests.support.shown_commands import PAGES, ROOT, Command, shown
from tests.support.tiny_chat import save_chat_tokenizer, tiny_chat_model
from tests.support.tiny_model import tiny_checkpoint

SHORT = (
    "cluster=inprocess",
    "steps=2",
    "flow.groups_per_step=2",
    "flow.groups_per_take=1",
    "rollout.group_size=2",
    "rollout.max_tokens=24",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "engine.max_batch=8",
    "trainer.device=cpu",
)
LONG = (
    "experiment=smollm2",
    "experiment=one_gpu",
    "engine=vllm",
    "engine=transformers",
    "task=code",
    "trainer.ranks=2",
    "engine.device=cuda",
)
"""What takes a GPU, minutes, several processes or a sandbox is planned here; tests of its own run it."""
STAND_INS = {
    "experiment=smollm2": "model",
    "experiment=one_gpu_8b": "qwen3",
    "experiment=one_gpu_30b_a3b": "qwen3_moe",
}
"""Experiments that train a checkpoint, and the tiny model of the same family instead of it."""
ELSEWHERE = {
    "git": "a clone is what this test runs in",
    "ray": "make test-cluster starts a cluster",
    "vllm": "serves what asyncrl has exported, on a GPU",
    "cp": "the commands behind it are read with the original",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a reader has it: the clone, a model, prompts, a reward, a finished run."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("configs", "examples", "benchmarks"):
        (place / name).symlink_to(ROOT / name)
    (place / "my_reward.py").write_text(_first_python(ROOT / "README.md"))
    for name, code in re.findall(
        r"```python\n# (my_\w+\.py)\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL
    ):
        (place / name).write_text(code)
    prompts = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)]
    (place / "prompts.jsonl").write_text("".join(prompts))
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    chats = [json.dumps({"messages": turns * (1 + n)}) + "\n" for n in range(8)]
    (place / "chats.jsonl").write_text("".join(chats))
    tests = [{"stdin": "1 2", "stdout": "3"}]
    problems = [json.dumps({"prompt": f"Print the sum, case {n}.", "tests": tests}) + "\n" for n in range(60)]
    (place / "problems.jsonl").write_text("".join(problems))
    tiny_chat_model(place / "model")
    for family in ("qwen3", "qwen3_moe"):
        tiny_checkpoint(place / family, family, vocab_size=268, max_position_embeddings=1024, eos_token_id=257)
        save_chat_tokenizer(place / family)
    make_model(WarmStart(steps=200), ChainsTask(), 0, place / "small")
    run = ("experiment=quickstart", "model=checkpoint", f"model.path={place / 'small'}", "name=mine", *SHORT)
    assert _quietly("run", *run, f"root={place / 'runs'}") == 0
    for name in ("first", "my-run"):
        shutil.copytree(place / "runs/mine", place / "runs" / name)
    return place


DAILY = ("README.md", "docs/index.md", "docs/pipelines.md", "docs/commands.md")
"""Of the others it takes minutes."""


def pages() -> list[Any]:
    found = [str(page.relative_to(ROOT)) for page in PAGES if shown(page)]
    return [pytest.param(page, marks=() if page in DAILY else pytest.mark.slow) for page in found]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", pages())
def test_commands_work(page: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(world, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    why_not = needs.bubblewrap()
    contained = [command for command in shown(ROOT / page) if why_not and "task=code" in command.words]
    for command in shown(ROOT / page):
        if command not in contained:
            _try(command, monkeypatch)
    if contained:
        pytest.skip(why_not)


def test_commands_are_whole() -> None:
    found = [str(command) for page in PAGES for command in shown(page) if {"...", "…"} & set(command.words)]
    assert not found, "these cannot be copied"


def _try(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    match command.words:
        case [("asyncrl" | ".venv/bin/asyncrl"), *rest]:
            _asyncrl(command, list(rest))
        case ["make", target, *_]:
            make = shutil.which("make") or "make"
            subprocess.run([make, "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
        case ["python", "-m", module, *_]:
            assert importlib.import_module(module).main, command
        case ["python", script, *arguments]:
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            with redirect_stdout(StringIO()):
                runpy.run_path(script, run_name="__main__")
        case ["pip", "install", *packages]:
            assert _extras(packages) <= set(_project()["optional-dependencies"]), command
        case ["kubectl", "apply", "-f", file]:
            assert Path(file).exists(), command
        case [program, *_]:
            assert program in ELSEWHERE or program == "kubectl", command


def _asyncrl(command: Command, words: list[str]) -> None:
    match words:
        case ["submit", *_] | ["run", *_] if words[0] == "submit" or "cluster=auto" in words:
            assert parse(words).command == words[0]  # make test-cluster brings a cluster up
        case ["run" | "plan" | "chaos", *overrides] if "--config" not in overrides:
            kind = "run" if words[0] == "run" and not any(long in " ".join(overrides) for long in LONG) else "plan"
            settings = _local([word for word in overrides if "=" in word])
            named = next(word for word in settings if word.startswith("name="))
            shutil.rmtree(Path("runs", named.removeprefix("name=")), ignore_errors=True)
            assert _quietly(kind, *settings) == 0, command
        case ["drafter", "train", *_] if "--steps" not in words:
            assert _quietly(*words, "--steps", "20") == 0, command
        case _:
            assert _quietly(*words) == 0, command


def _local(settings: Sequence[str]) -> list[str]:
    """The reader's models are our tiny ones, runs are short, and nobody trains on a GPU."""
    settings = [word for word in settings if not word.startswith("model.steps=") and word != "trainer.device=cuda"]
    stand_in = next((model for experiment, model in STAND_INS.items() if experiment in settings), "")
    path = f"model.path={Path(stand_in or 'model').resolve()}"
    own = [path if word.startswith("model.path=") else word for word in settings]
    own = [re.sub(r"path: [^,}]+", f"path: {Path('model').resolve()}", word) for word in own]
    names = {word.partition("=")[0] for word in own}
    if stand_in and "model.path" not in names:
        own.append(path)
    elif not stand_in and "model" not in names:
        own += ["model=checkpoint", f"model.path={Path('small').resolve()}"]
    if "name" not in names:
        own.append(f"name=shown-{len(list(Path('runs').iterdir()))}")
    if "pipeline=sft" in own:
        names.add("rollout.group_size")  # an example is a group of its own
    if "experiment=one_gpu_8b" in own:
        names.add("trainer.device")  # a CPU has nothing to offload from
    short = [word for word in SHORT if word.partition("=")[0] not in names]
    return [*own, *(word for word in short if "trainer.ranks" not in names or "cluster" not in word)]


def _quietly(*words: str) -> int:
    with redirect_stdout(StringIO()):
        return main(words)


def _first_python(page: Path) -> str:
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found
    return textwrap.dedent(found[1])


def _extras(packages: Sequence[str]) -> set[str]:
    found = [re.findall(r"\[(.*?)\]", word) for word in packages if "asyncrl[" in word or word.startswith(".[")]
    return {extra for groups in found for group in groups for extra in group.split(",")}


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
