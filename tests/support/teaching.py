"""What a distillation computes, by transformers and from its definition."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.types import GIVEN, Group, Ints, Trajectory


def all_logp(model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0) -> Tensor:
    """Of every token of the vocabulary at the place of each sampled one, of one sample by itself, with a gradient."""
    tokens_T = torch.from_numpy(trajectory.tokens.astype(np.int64))
    logp_T_V = (model(tokens_T[None]).logits[0] / temperature)[:-1].log_softmax(-1)
    return logp_T_V[torch.from_numpy(trajectory.versions[1:] != GIVEN)]


def sampled_logp(model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0) -> Tensor:
    """Of the sampled tokens."""
    target_L = torch.from_numpy(trajectory.tokens[trajectory.versions != GIVEN].astype(np.int64))
    return all_logp(model, trajectory, temperature).gather(1, target_L[:, None]).squeeze(1)


@torch.no_grad()
def likeliest_tokens(model: PreTrainedModel, trajectory: Trajectory, count: int, temperature: float = 1.0) -> Ints:
    """As a trajectory has them, by sorting."""
    logp_L_V, ids_L_V = all_logp(model, trajectory, temperature).sort(-1, descending=True)
    tail_L_1 = logp_L_V[:, count:].logsumexp(-1, keepdim=True).clamp(min=-50.0)
    said_L_B = torch.cat((logp_L_V[:, :count], tail_L_1), 1)
    return torch.cat((ids_L_V[:, :count].int(), said_L_B.view(torch.int32)), 1).numpy()


def taught(
    groups: Sequence[Group], teachers: Sequence[tuple[PreTrainedModel, float]], *, top_k: int = 0
) -> list[Group]:
    """With the weighted mean of the teachers' log-probabilities, and the likeliest tokens of the only one."""
    return [
        msgspec.structs.replace(
            group, trajectories=tuple(_taught(each, teachers, top_k) for each in group.trajectories)
        )
        for group in groups
    ]


@torch.no_grad()
def _taught(trajectory: Trajectory, teachers: Sequence[tuple[PreTrainedModel, float]], top_k: int) -> Trajectory:
    total = sum(weight for _, weight in teachers)
    mean = sum((weight * sampled_logp(model, trajectory) for model, weight in teachers), torch.zeros(1)) / total
    return msgspec.structs.replace(
        trajectory,
        teacher_logprob_bytes=mean.numpy().astype(np.float32).tobytes(),
        teacher_top_k_bytes=likeliest_tokens(teachers[0][0], trajectory, top_k).tobytes() if top_k else b"",
    )
