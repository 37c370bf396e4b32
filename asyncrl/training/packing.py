"""Trajectories to packed batches: tokens one after the other, no padding, at most a token budget each.

Axis suffixes: T all tokens of a batch, L its sampled tokens. Logits are needed only where the *next* token was
sampled, so `predict_L` points at those positions and everything per sampled token has the same length.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.types import GIVEN, Floats, Ints, Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with its advantage, as arrays."""

    tokens: Ints
    logprobs: Floats
    sampled: np.ndarray
    advantage: float

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float) -> "Sample":
        sampled = trajectory.versions != GIVEN
        if sampled[0]:
            raise ValueError(f"trajectory {trajectory.slot} starts with a sampled token: a prompt must come first")
        return cls(trajectory.tokens, trajectory.logprobs, sampled, advantage)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything one forward and backward needs."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    lengths: tuple[int, ...]
    predict_L: torch.Tensor
    target_L: torch.Tensor
    behaviour_logp_L: torch.Tensor
    advantage_L: torch.Tensor


def pack(samples: Iterable[Sample], token_budget: int) -> Iterator[PackedBatch]:
    """Longest first, each batch filled up to the budget; one sample longer than the budget is a batch of its own."""
    chosen: list[Sample] = []
    used = 0
    for sample in sorted(samples, key=lambda s: len(s.tokens), reverse=True):
        if chosen and used + len(sample.tokens) > token_budget:
            yield _batch(chosen)
            chosen, used = [], 0
        chosen.append(sample)
        used += len(sample.tokens)
    if chosen:
        yield _batch(chosen)


def _batch(samples: list[Sample]) -> PackedBatch:
    tokens = np.concatenate([s.tokens for s in samples]).astype(np.int64)
    sampled = np.flatnonzero(np.concatenate([s.sampled for s in samples]))
    advantages = np.concatenate([np.full(int(s.sampled.sum()), s.advantage, np.float32) for s in samples])
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens),
        positions_T=torch.from_numpy(np.concatenate([np.arange(len(s.tokens)) for s in samples])),
        lengths=tuple(len(s.tokens) for s in samples),
        predict_L=torch.from_numpy(sampled - 1),
        target_L=torch.from_numpy(tokens[sampled]),
        behaviour_logp_L=torch.from_numpy(np.concatenate([s.logprobs for s in samples])[sampled]),
        advantage_L=torch.from_numpy(advantages),
    )
