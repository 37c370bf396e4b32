"""A run of your own, in Python: your prompts, your reward, your model, every setting typed and checked.

    python examples/own_run.py MODEL_DIRECTORY PROMPTS.jsonl

The file is its own reward: the run names the function below, and it is called in a process of its own.
"""

import sys
from pathlib import Path

from asyncrl.config import Checkpoint, Evaluation, Flow, Reward, Rollout, Run, Trainer
from asyncrl.config.task import JsonlTask


def reward(prompt: str, completion: str, answer: str) -> float:
    """Full marks for the answer, a little for stopping in time."""
    return 1.0 if completion.rstrip("$") == answer else 0.1 * completion.endswith("$")


def own_run(model: str, prompts: str, root: str = "runs") -> Run:
    return Run(
        name="own",
        root=root,
        steps=4,
        max_staleness=1,
        cluster="inprocess",
        model=Checkpoint(path=model),
        task=JsonlTask(path=prompts, held_out=0.25),
        reward=Reward(function=f"{Path(__file__).resolve()}:reward"),
        rollout=Rollout(group_size=4, max_tokens=32),
        flow=Flow(groups_per_step=4, groups_per_take=1),
        trainer=Trainer(lr=1e-4),
        evaluation=Evaluation(prompts=8),
    )


if __name__ == "__main__":
    from pipelines.train import train  # here: the reward's process imports this file too, and needs no trainer

    sys.exit(train(own_run(*sys.argv[1:])))
