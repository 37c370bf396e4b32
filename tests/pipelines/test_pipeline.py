"""Pipelines in Python: functions and iterators as they are, in a running event loop, refused where they cannot go."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Reward, Rollout
from asyncrl.config.algorithm import CustomAlgorithm, Grpo
from asyncrl.config.task import ChainsTask, DatasetTask, JsonlTask, ParquetTask, PythonTask, ReasoningGymTask
from asyncrl.config.task import TaskSettings as Task
from asyncrl.errors import ConfigError
from asyncrl.system import user_functions
from asyncrl.user_code.pool import check_function
from pipelines.pipeline import Pipeline
from pipelines.supervision.thread_runner import run_in_thread, run_loop
from pipelines.train import resume

SMALL: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_tokens": 24},
    "flow": {"groups_per_step": 2, "groups_per_take": 1},
    "evaluation": {"prompts": 4},
    "checkpoint": {"every": 1},
}


def chains() -> Iterator[tuple[str, str]]:
    while True:
        yield from ((f"a{i}b+{j}=", f"a{i}b+{j}{i + j}") for i in range(6) for j in (1, 2, 3))


def in_a_notebook(pipeline: Pipeline) -> Any:
    """As a cell is run: while the kernel's own event loop runs."""

    async def cell() -> Any:
        return pipeline.run()

    return asyncio.run(cell())


def test_lambdas_and_generators_in_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    seen = list[str]()
    pipeline = Pipeline(
        model=model,
        prompts=chains(),
        reward=lambda prompt, completion, answer: seen.append(completion) or float(len(completion)),
        stages=[lambda samples: [sample.rewarded(sample.reward / 24) for sample in samples]],
        name="cells",
        root=str(tmp_path),
        steps=2,
        **SMALL,
    )
    assert pipeline.config.reward.function == "here:cells/reward"
    result = in_a_notebook(pipeline)
    assert result.directory == tmp_path / "cells"
    assert result.summary["samples_trained"] == 8
    assert len(seen) >= 8 + 2 * 2 * 4
    curves = result.curves()
    assert curves["reward"].steps == [1, 2]
    assert all(0 < value <= 1 for value in curves["reward"].values if value is not None)
    assert curves["held_out"].steps == [0, 2]
    page = result._repr_html_()
    assert "<svg" in page
    assert "held-out" in page
    assert "2 steps, 8 samples" in page
    with pytest.raises(ConfigError, match="exists already"):
        pipeline.run()
    assert pipeline.resume().summary["steps"] == 2


def test_a_run_from_here_resumes_only_from_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"model": model, "prompts": "chains", "name": "x", "root": str(tmp_path), **SMALL}
    Pipeline(reward=lambda *_: 1.0, steps=1, **settings).run()
    monkeypatch.setattr(user_functions, "_kept", {})  # as in any other process
    with pytest.raises(ConfigError, match=r"here:x/reward was written in the program or notebook.*\.resume\(\)"):
        resume(tmp_path / "x")


def test_what_others_would_have_to_call_must_have_a_name(model: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(
        model=model, prompts=chains, reward=lambda *_: 1.0, cluster="local", root=str(tmp_path), name="r"
    )
    with pytest.raises(ConfigError, match=r"here:r/reward: a lambda or a function of a notebook.*cluster=inprocess"):
        pipeline.run()
    named = Pipeline(model=model, prompts=chains, reward=reward, cluster="local", root=str(tmp_path))
    assert named.config.reward.function.endswith("test_pipeline:reward")
    assert named.config.name == "pipeline-1"


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def test_a_file_that_starts_a_run_on_import_is_told_how_not_to(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pipelines.pipeline import Pipeline\n"
        "def reward(prompt, completion, answer): return 1.0\n"
        f"Pipeline(model={str(model)!r}, prompts='chains', reward=reward, root={str(tmp_path)!r}, steps=1).run()\n"
    )
    with pytest.raises(ConfigError, match='put the start under `if __name__ == "__main__":`'):
        check_function(Reward(function=f"{script}:reward"))
    assert not (tmp_path / "pipeline-1").exists()


@pytest.mark.parametrize(
    ("prompts", "task"),
    [
        ("chains", ChainsTask()),
        ("a/b.jsonl", JsonlTask(path="a/b.jsonl")),
        (Path("a/b.parquet"), ParquetTask(path="a/b.parquet")),
        ("reasoning_gym:chain_sum", ReasoningGymTask(dataset="chain_sum")),
        ("openai/gsm8k", DatasetTask(name="openai/gsm8k")),
        (["1+1="], PythonTask(function="here:p/prompts")),
        (chains, PythonTask(function="tests.pipelines.test_pipeline:chains")),
    ],
)
def test_sources(prompts: Any, task: Task) -> None:
    config = Pipeline(model="m", prompts=prompts, name="p").config
    assert config.task == task
    judged = "reasoning_gym:graded" if isinstance(task, ReasoningGymTask) else "chains:reward"
    assert judged in config.reward.function


def test_settings_are_structs_or_dicts_and_wrong_ones_are_named() -> None:
    config = Pipeline(model="m", prompts="chains", rollout=Rollout(max_tokens=7), trainer={"lr": 0.1}).config
    assert (config.rollout.max_tokens, config.trainer.lr, config.cluster) == (7, 0.1, "inprocess")
    assert config.algorithm == Grpo()
    own = Pipeline(model="m", prompts="chains", algorithm=reward).config.algorithm
    assert own == CustomAlgorithm(function="tests.pipelines.test_pipeline:reward")
    with pytest.raises(ConfigError, match=r"unknown key trainer\.learning_rate"):
        Pipeline(model="m", prompts="chains", trainer={"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"unknown key lr: did you mean .*trainer\.lr"):
        Pipeline(model="m", prompts="chains", lr=0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"algorithm='gprpo' does not exist: did you mean g"):
        Pipeline(model="m", prompts="chains", algorithm="gprpo")


def test_an_interrupt_ends_the_run_in_its_thread() -> None:
    """Ctrl-C, or the stop button of a notebook."""
    ended = list[str]()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed in good order")

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(lambda: run_loop(forever()))
    assert ended == ["closed in good order"]


def test_a_notebook_shows_progress_and_a_picture(model: Path, tmp_path: Path) -> None:
    """In a real kernel, which has an event loop of its own."""
    script = Path(__file__).with_name("notebook_cell.py")
    command = [sys.executable, "-W", "ignore", script, model, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    pages = [data["text/html"] for _, data in shown if "text/html" in data]
    assert [page.count("<svg") for page in pages if "<svg" in page] == [1, 1]
    assert any("step <b>2/2</b>" in page for page in pages), "redrawn at every step"
    assert any("held-out after step 0" in page for page in pages)
    assert shown[-1][0] == "execute_result"
    assert "2 steps, 8 samples" in shown[-1][1]["text/html"]
