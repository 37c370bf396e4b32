"""An algorithm of your own: advantages of a group, and the loss of a token.

python examples/own_algorithm.py MODEL_DIRECTORY
"""

import sys

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.algorithms.base import Tokens
from asyncrl.config.algorithm import CustomAlgorithm
from pipelines.pipeline import Pipeline


def advantages(reward_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Against the median, which one lucky completion does not move."""
    return reward_G - np.median(reward_G)


def loss(tokens: Tokens) -> Tensor:
    """Where the ratio has left 1 +- 0.2 there is no gradient, whatever the sign of the advantage."""
    return -tokens.advantage_L * tokens.ratio.clamp(0.8, 1.2)


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1],
        prompts="chains",
        reward="asyncrl.tasks.chains:graded_reward",
        algorithm=CustomAlgorithm(function=f"{__file__}:loss", advantages=f"{__file__}:advantages"),
        steps=3,
        rollout={"group_size": 4, "max_tokens": 64},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 4},
    ).run()
    print(result)
