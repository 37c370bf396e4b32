"""What is tried before anything expensive starts: the reward, or the examples of a supervised start."""

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


def _examples(run: Run) -> list[str]:
    """What a supervised start is to be trained on; ConfigError if a row is wrong. A model that is made with the run
    has no tokenizer yet: then the examples are first read when the run begins."""
    if (directory := run.model.directory) is None:
        return []
    from asyncrl.supervised.examples import load_examples

    return load_examples(run, directory).told()


def tried(run: Run) -> list[str]:
    """What is said of it before a run; ConfigError if it fails."""
    return _examples(run) if run.sft.on else reward_trial(run)


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
