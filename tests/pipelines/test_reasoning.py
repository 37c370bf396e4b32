"""The recipe with a real model, with a tiny one in its place: chat template, reasoning-gym, partial credit."""

import importlib.util
import json
from pathlib import Path

import pytest

from asyncrl.buffer.reader import read_run
from asyncrl.tasks.registry import make_task
from pipelines.compose import compose
from pipelines.plan.plan import problems
from pipelines.train import train
from tests.support.tiny_chat import chat_ids, save_chat_tokenizer, tiny_chat_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2_reasoning.py"
SMALL = (
    "cluster=inprocess",
    "engine=native",
    "steps=2",
    "flow.groups_per_step=2",
    "flow.groups_per_take=1",
    "rollout.group_size=8",
    "rollout.max_tokens=24",
    "rollout.precision=fp32",
    "rollout.system=Count",
    "trainer.dtype=fp32",
    "evaluation.prompts=16",
    "evaluation.every=0",
    "task=reasoning_gym",
    "task.dataset=chain_sum",
    "task.options.max_terms=2",
    "task.options.max_digits=1",
    "task.examples=1",
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("chat"))


def test_a_run(tmp_path: Path, chat_model: Path) -> None:
    run = compose(["experiment=smollm2", *SMALL, f"model.path={chat_model}", f"root={tmp_path}", "name=run"])
    assert train(run) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("ok", 2, 32)
    assert sum(summary["ledger"]["dropped"].values()) == 0
    assert 0 < summary["reward_first"] < 1  # a tagged answer is half in reach of a random model, a right one is not

    # Training and preflight see the prompt that transformers would have made of it.
    task = make_task(run.task, run.seed)
    for trajectory in read_run(tmp_path / "run" / "trajectories"):
        _, split, index = trajectory.prompt.split("/")
        assert split == "train"
        prompt = task.prompt("train", int(index))
        expected = chat_ids(chat_model, *prompt.earlier, prompt.text, system="Count")
        assert (len(prompt.earlier), trajectory.segments[0].tokens.tolist()) == (2, expected)
        assert trajectory.reward == 0 or 0.1 <= trajectory.reward <= 1

    first = summary["evaluations"]["0"]
    assert summary["eval_first"] == first["sampled"] == round(first["sampled"] * 16) / 16  # a share of 16 answers
    assert first["sampled"] < first["reward"] < 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task.dataset=chain_sumn", "did you mean chain_sum?"),
        ("task.options.max_terns=2", "did you mean task.options.max_terms?"),
        ("task.options.max_terms=0", "max_terms must be"),
    ],
)
def test_preflight_refuses_a_task_that_does_not_exist(
    tmp_path: Path, chat_model: Path, override: str, said: str
) -> None:
    overrides = [*SMALL, f"model.path={chat_model}", f"root={tmp_path}", "name=run"]
    assert problems(compose(["experiment=smollm2", *overrides])) == []
    (problem,) = problems(compose(["experiment=smollm2", *overrides, override]))
    assert said in problem


def test_preflight_refuses_a_model_without_a_chat_template(tmp_path: Path, chat_model: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((chat_model / name).read_bytes())
    save_chat_tokenizer(tmp_path, None)
    overrides = [*SMALL, f"model.path={tmp_path}", f"root={tmp_path}", "name=run"]
    (problem,) = problems(compose(["experiment=smollm2", *overrides]))
    assert problem.startswith(f"model.path={tmp_path}: it has no chat template; set rollout.chat=false")
    assert (
        problems(
            compose(["experiment=smollm2", *overrides, "rollout.chat=false", "rollout.system=''", "task.examples=0"])
        )
        == []
    )


def test_the_example_is_the_experiment() -> None:
    spec = importlib.util.spec_from_file_location("smollm2_reasoning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for engine in ("native", "vllm"):
        assert module.smollm2("models/smollm2", engine) == compose(["experiment=smollm2", f"engine={engine}"])
