"""Your questions, your columns, your reward.

    python examples/own_reward.py MODEL_DIRECTORY QUESTIONS.jsonl

The file has a `question` and a `solution` on every line. Parquet files and Hugging Face datasets have columns too:
asyncrl.config.task names their settings.
"""

import sys

from asyncrl.config.task import JsonlTask
from pipelines.pipeline import Pipeline


def reward(prompt: str, completion: str, answer: str) -> float:
    """Full marks for the solution, a little for stopping in time."""
    said = completion.rstrip("$")
    return 1.0 if said == answer else 0.1 * (said != completion)


def pipeline(model: str, questions: str) -> Pipeline:
    return Pipeline(
        model=model,
        prompts=JsonlTask(path=questions, prompt="question", answer="solution", held_out=0.25),
        reward=reward,
        steps=3,
        rollout={"group_size": 4, "max_tokens": 32},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 8},
    )


if __name__ == "__main__":
    print(pipeline(*sys.argv[1:3]).run())
