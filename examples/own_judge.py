"""A language model judges: two questions about each completion, beside a function that checks the answer.

    python examples/own_judge.py MODEL_DIRECTORY http://localhost:8000/v1 NAME_OF_THE_JUDGE

Any server with OpenAI's chat completions will do, such as `vllm serve`. A key is read from JUDGE_KEY, if that is set.
"""

import os
import sys

from asyncrl.config.judge import Item, Judge
from pipelines.pipeline import Pipeline


def reward(prompt: str, completion: str, answer: str) -> float:
    """What can be computed needs no judge."""
    return float(completion == answer)


def judge(url: str, model: str) -> Judge:
    return Judge(
        url=url,
        model=model,
        api_key_env="JUDGE_KEY" if "JUDGE_KEY" in os.environ else "",
        rubric={
            "steps": "Does every step follow from the one before?",
            "clear": Item(ask="How easy is it to follow?", points=5, weight=0.5),
        },
        weight=0.5,
        options={"temperature": 0, "max_tokens": 300},
        concurrency=8,
        max_calls=2000,
    )


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1],
        prompts="chains",
        reward=reward,
        judge=judge(*sys.argv[2:4]),
        steps=3,
        rollout={"group_size": 4, "max_tokens": 32},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 8},
    ).run()
    print(result.summary["judge"])
