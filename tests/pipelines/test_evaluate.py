"""What counts as right when rewards are graded."""

import asyncio
from typing import Any, cast

import pytest

from actors.rollout.actor import Judged, RolloutActor
from asyncrl.config import Evaluation, Run
from asyncrl.config.task import ChainsTask
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt
from pipelines.evaluate import Scores, evaluate


class Scripted:
    """A rollout actor whose answers earn what the size of the problem says."""

    def __init__(self, sampled: dict[int, float]) -> None:
        self._sampled = sampled

    async def evaluate(self, prompts: list[Prompt], *, greedy: bool, seed: int) -> list[Judged]:
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
