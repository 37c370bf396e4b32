"""Groups with their rewards turned into advantages: what there is to learn from."""

from collections.abc import Sequence

import numpy as np

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantage import Rewards, overlong_penalty
from asyncrl.algorithms.settings import CustomAlgorithm, Ppo
from asyncrl.config import Run
from asyncrl.training.packing import Block, block
from asyncrl.types import Group


def graded(run: Run, groups: Sequence[Group]) -> list[Block]:
    """The blocks that matter."""
    rewards = [_rewards(run, group) for group in groups]
    advantages = registry.entry(run.algorithm).advantages(run.algorithm, rewards)
    blocks = [block(group, found.tolist()) for group, found in zip(groups, advantages, strict=True)]
    if _learns_from_everything(run):
        return blocks
    # Advantage 0 adds tokens to the denominator and nothing to the gradient: no forward is spent on such a group.
    return [block for block in blocks if any(answer.advantage != 0.0 for answer in block.answers)]


def _learns_from_everything(run: Run) -> bool:
    """Whether a group can matter although its rewards are all equal."""
    algorithm = run.algorithm
    return isinstance(algorithm, Ppo | CustomAlgorithm) or bool(algorithm.kl.coefficient or algorithm.entropy)


def _rewards(run: Run, group: Group) -> Rewards:
    lengths = np.array([t.sampled_tokens for t in group.trajectories])
    rewards = np.array([t.reward for t in group.trajectories], dtype=np.float64)
    return rewards + overlong_penalty(run.algorithm.overlong, lengths, run.rollout.max_tokens)
