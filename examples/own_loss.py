"""A loss and a correction of your own: plain functions, named in the config.

    asyncrl run experiment=quickstart \\
        algorithm=custom algorithm.function=examples/own_loss.py:loss \\
        correction=custom correction.function=examples/own_loss.py:weights

Everything else stays as it is: group-relative advantages, aggregation, KL and entropy terms, diagnostics, replay.
"""

import torch
from torch import Tensor

from asyncrl.algorithms.base import Samples, Tokens

WIDTH = 0.2


def loss(tokens: Tokens) -> Tensor:
    """GRPO with a soft clip, - A (1 + w tanh((r - 1) / w)): beyond 1 +- w the gradient fades instead of stopping."""
    soft_ratio_L = 1 + WIDTH * torch.tanh((tokens.ratio - 1) / WIDTH)
    return -tokens.advantage_L * soft_ratio_L


def weights(log_ratio_L: Tensor, samples: Samples) -> Tensor:
    """Smoothly truncated importance weights: 2 rho / (1 + rho), which is 1 on-policy and never above 2.

    `samples` tells which sample and which age each token has, for corrections of whole completions; 0 rejects a token.
    """
    return 2 * torch.sigmoid(log_ratio_L)
