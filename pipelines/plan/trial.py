"""The reward and its judge, called on real prompts before anything expensive starts."""

import asyncio
from collections.abc import Sequence

from asyncrl.config import Run
from asyncrl.judges.trial import try_judge
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt
from asyncrl.user_code.trial import told, try_reward
from pipelines.supervision.thread_runner import in_a_loop, run_in_thread

PROMPTS = 8
"""Most that are tried: one on which the function does not fail is enough."""


def reward_trial(run: Run) -> list[str]:
    """What it returned, in lines; ConfigError if it fails whatever the completion is. A harness decides what its reward
    gets, so beside one only the judge is tried."""
    if run.agent.on and not run.reward.judge.on:
        return []
    task = make_task(run.task, run.seed)
    prompts = [task.prompt("train", number) for number in range(min(PROMPTS, run.steps * run.flow.groups_per_step))]
    trying = _try(run, prompts)
    return run_in_thread(lambda: asyncio.run(trying)) if in_a_loop() else asyncio.run(trying)


async def _try(run: Run, prompts: Sequence[Prompt]) -> list[str]:
    reward, said = run.reward, list[str]()
    if reward.function and not run.agent.on:
        said += told(await try_reward(reward, prompts, turns=run.environment.on), prompts[0])
    if reward.judge.on:
        said += await try_judge(reward.judge, prompts[0])
    return said
