"""What a distillation computes, by transformers and from its definition."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.types import GIVEN, Group, Trajectory


def sampled_logp(model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0) -> Tensor:
    """Of the sampled tokens of one sample by itself, with a gradient."""
    tokens_T = torch.from_numpy(trajectory.tokens.astype(np.int64))
    logits_T_V = model(tokens_T[None]).logits[0] / temperature
    logp_T = logits_T_V[:-1].log_softmax(-1).gather(1, tokens_T[1:, None]).squeeze(1)
    return logp_T[torch.from_numpy(trajectory.versions[1:] != GIVEN)]


def taught(groups: Sequence[Group], teachers: Sequence[tuple[PreTrainedModel, float]]) -> list[Group]:
    """With the weighted mean of the teachers' log-probabilities."""
    return [
        msgspec.structs.replace(group, trajectories=tuple(_taught(each, teachers) for each in group.trajectories))
        for group in groups
    ]


@torch.no_grad()
def _taught(trajectory: Trajectory, teachers: Sequence[tuple[PreTrainedModel, float]]) -> Trajectory:
    total = sum(weight for _, weight in teachers)
    mean = sum((weight * sampled_logp(model, trajectory) for model, weight in teachers), torch.zeros(1)) / total
    return msgspec.structs.replace(trajectory, teacher_logprob_bytes=mean.numpy().astype(np.float32).tobytes())
