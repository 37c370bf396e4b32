"""A reward with named parts, a judge that adds one to them, and the mean of each over the steps.

    python examples/own_parts.py MODEL_DIRECTORY

What is learned from is their sum. A total of its own has `Score(total, parts)` of asyncrl.user_code.score.
"""

import sys

from asyncrl.user_code.stages import Sample
from pipelines.pipeline import Pipeline


def reward(prompt: str, completion: str, answer: str) -> dict[str, float]:
    """Full marks for the right answer, a little for stopping in time."""
    return {"right": float(completion == answer), "ended": 0.1 * completion.endswith("$")}


def judge(samples: list[Sample]) -> list[Sample]:
    """Short completions please it."""
    return [sample.rewarded({**sample.parts, "brief": 0.1 / sample.tokens}) for sample in samples]


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1],
        prompts="chains",
        reward=reward,
        stages=[judge],
        steps=3,
        rollout={"group_size": 2, "max_tokens": 64},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 4},
    ).run()
    print({name: curve.values for name, curve in result.curves().items() if name.startswith("reward_parts.")})
