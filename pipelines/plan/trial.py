"""The reward, called on real prompts before anything expensive starts."""

import asyncio

from asyncrl.config import Run
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.trial import told, try_reward
from pipelines.supervision.thread_runner import in_a_loop, run_in_thread

PROMPTS = 8
"""Most that are tried: one on which the function does not fail is enough."""


def reward_trial(run: Run) -> list[str]:
    """What it returned, in lines; ConfigError if it fails whatever the completion is. A harness decides what its reward
    gets, so beside one nothing is tried."""
    if run.agent.on:
        return []
    task = make_task(run.task, run.seed)
    prompts = [task.prompt("train", number) for number in range(min(PROMPTS, run.steps * run.flow.groups_per_step))]
    trying = try_reward(run.reward, prompts, turns=run.environment.on)
    trials = run_in_thread(lambda: asyncio.run(trying)) if in_a_loop() else asyncio.run(trying)
    return told(trials, prompts[0])
