"""A whole run in a few lines: prompts, a reward, a model.

    python examples/quick_pipeline.py [MODEL_DIRECTORY]

Without a model a small one is made on the spot, which takes some seconds.
"""

import sys

from asyncrl.config import WarmStart
from pipelines.pipeline import Pipeline


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1] if len(sys.argv) > 1 else WarmStart(steps=100),
        prompts="chains",
        reward=reward,
        steps=4,
        rollout={"group_size": 4},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 16},
    ).run()
    print(result)
    print(result.curves()["reward"].values)
