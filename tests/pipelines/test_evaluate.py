"""Held-out scores: what counts as right, over several completions of a prompt, by suite, and beside training."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from transformers import AutoModelForCausalLM

from actors.rollout.actor import Judged, RolloutActor
from asyncrl.config import Evaluation, Reward, Run
from asyncrl.config.run import Suite
from asyncrl.config.task import ChainsTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt
from pipelines.compose import compose
from pipelines.evaluate import SEEDS_APART, Scores, evaluate, suite_rewards
from tests.support import quickstart_runs
from tests.support.command import asyncrl


class Scripted:
    """A rollout actor whose answers earn what the size of the problem says."""

    def __init__(self, sampled: dict[int, float]) -> None:
        self._sampled = sampled

    async def evaluate(self, prompts: list[Prompt], *, greedy: bool, seed: int, suite: str = "") -> list[Judged]:
        return [Judged(1.0 if greedy else self._sampled[prompt.size], prompt.size) for prompt in prompts]


def scores(rewards: dict[int, float], **settings: Any) -> Scores:
    run = Run(task=ChainsTask(max_size=4), evaluation=Evaluation(prompts=40, **settings))
    rollouts = [cast(RolloutActor, Scripted(rewards)) for _ in range(2)]
    found = asyncio.run(evaluate(run, rollouts, make_task(run.task, run.seed)))
    assert found is not None
    return found


def test_accuracy_counts_full_marks_and_reward_is_the_mean() -> None:
    task = make_task(ChainsTask(max_size=4), 0)
    sizes = [task.prompt("held_out", index).size for index in range(40)]
    fours = sizes.count(4)
    assert 0 < fours < 40
    found = scores({2: 1.0, 3: 1.0, 4: 0.75})
    assert found.sampled == (40 - fours) / 40
    assert found.reward == pytest.approx((40 - fours + 0.75 * fours) / 40)
    assert (found.greedy, found.by_size) == (1.0, {"1-3": 1.0, "4-4": 0.0})


def test_another_scale_says_where_right_begins() -> None:
    assert scores({2: 0.5, 3: 0.5, 4: 0.5}, right_from=0.5).sampled == 1
    assert scores({2: 0.5, 3: 0.5, 4: 0.5}, right_from=0.6).sampled == 0
    assert scores({2: 7.0, 3: 7.0, 4: 10.0}, right_from=10).by_size == {"1-3": 0.0, "4-4": 1.0}


class Dice:
    """Right by what is written for each prompt and each of its completions, and only in a suite when greedy."""

    def __init__(self, right: list[list[bool]]) -> None:
        self._right = right

    async def evaluate(self, prompts: list[Prompt], *, greedy: bool, seed: int, suite: str = "") -> list[Judged]:
        if greedy:
            return [Judged(float(suite == "other"), 1) for _ in prompts]
        return [Judged(float(right[seed // SEEDS_APART]), 1) for right in self._right[: len(prompts)]]


def test_several_completions_of_a_prompt() -> None:
    """avg@2 is the mean of all, pass@2 counts prompts with a right one; the interval is over prompts: their means are
    1, 1/2, 0, 0, with a standard deviation of sqrt(11/48), and 1.96 / sqrt(4) of that."""
    right = [[True, True], [False, True], [False, False], [False, False]]
    suites = (Suite(name="other", task=ChainsTask(), prompts=2),)
    run = Run(task=ChainsTask(), evaluation=Evaluation(prompts=4, samples=2, suites=suites))
    found = asyncio.run(evaluate(run, [cast(RolloutActor, Dice(right))], make_task(run.task, run.seed)))
    assert found is not None
    assert (found.sampled, found.passed, found.greedy) == (3 / 8, 1 / 2, 0.0)
    assert found.interval == pytest.approx(1.96 * (11 / 48) ** 0.5 / 2)
    other = found.suites["other"]
    assert (other.sampled, other.passed, other.greedy) == (3 / 4, 1.0, 1.0)
    assert (found.value("passed"), found.value("other.sampled")) == (1 / 2, 3 / 4)


def test_a_suite_is_judged_by_its_own_reward_or_that_of_its_task() -> None:
    own = Suite(name="own", task=ChainsTask(), reward=Reward(function="mine.py:f"))
    run = compose(
        ["evaluation.suites=[{name: plain, task: {type: chains}}, {name: code, task: {type: code, path: x}}]"]
    )
    run = Run(evaluation=Evaluation(suites=(*run.evaluation.suites, own)))
    assert {name: reward.function for name, reward in suite_rewards(run).items()} == {
        "code": "asyncrl.rewards.code:reward",
        "own": "mine.py:f",
    }


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("evaluation.best=greddy", "evaluation.best=greddy is not evaluated: did you mean greedy?"),
        ("evaluation.best=words.sampled", "evaluation.best=words.sampled is not evaluated"),
        ("evaluation.suites=[{name: A B, task: {type: chains}}]", "each has a name of its own, of small letters"),
    ],
)
def test_settings_that_cannot_be_meant(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        compose([setting])


def test_beside_training_nothing_that_is_trained_changes_and_the_best_weights_are_kept(
    tmp_path: Path, model: Path
) -> None:
    """Synchronous runs with one engine take the same samples, so that their weights show it."""
    same = ("max_staleness=0", "steps=6", "checkpoint.every=0", "evaluation.prompts=16")
    quickstart_runs.run(tmp_path / "without", model, *same)
    beside = ("evaluation.every=2", "evaluation.beside=true", "evaluation.best=reward", "evaluation.samples=2")
    quickstart_runs.run(tmp_path / "beside", model, *same, *beside)
    weights = [
        tmp_path / name / "run" / "checkpoints" / "step-6" / "model.safetensors" for name in ("without", "beside")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    run = tmp_path / "beside" / "run"
    assert "identical" in asyncrl("replay", str(run), "--out", str(tmp_path / "replay")).out
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scores = {event["step"]: event["scores"]["reward"] for event in found if event["kind"] == "evaluation"}
    left_out = {event["step"] for event in found if event["kind"] == "evaluation_left_out"}
    assert set(scores) | left_out == {0, 2, 4, 6}
    assert {0, 6} <= set(scores)
    best = json.loads((run / "best" / "score.json").read_text())
    assert best["score"] == scores[best["step"]] == max(score for step, score in scores.items() if step)
    assert AutoModelForCausalLM.from_pretrained(run / "best").num_parameters()
    assert not list(run.glob(".candidate-*"))


@pytest.mark.slow
def test_an_evaluator_that_dies_is_replaced_and_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    settings = ("cluster=local", "steps=40", "evaluation.every=1", "evaluation.beside=true", "checkpoint.every=0")
    running = quickstart_runs.start(tmp_path, model, *settings)
    events = tmp_path / "run" / "events.jsonl"

    def evaluated() -> list[int]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [event["step"] for event in map(json.loads, lines) if event["kind"] == "evaluation"]

    deadline = time.monotonic() + 120
    while not any(evaluated()) and time.monotonic() < deadline:
        time.sleep(0.2)
    known = set(json.loads((tmp_path / "run" / "actors.json").read_text()).values())
    engines = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("ray::RolloutActor")]
    mine = {p.pid for p in psutil.Process(running.pid).children(recursive=True)}
    (evaluator,) = [p for p in engines if p.pid not in known and (p.pid in mine or _same_run(p, known))]
    evaluator.kill()
    output = quickstart_runs.finish(running, timeout=240)
    assert "is left out" in output
    assert quickstart_runs.summary(tmp_path)["status"] == "ok"
    assert max(evaluated()) == 40


def _same_run(process: psutil.Process, known: set[int]) -> bool:
    """Workers of one Ray have the same parent."""
    parents = {psutil.Process(pid).ppid() for pid in known if psutil.pid_exists(pid)}
    return process.ppid() in parents
