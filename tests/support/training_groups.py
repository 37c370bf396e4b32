"""Groups to train on, and what a learner has made of them."""

import numpy as np
from torch import Tensor

from asyncrl.training.adamw import AdamW
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory


def make_groups(count: int, seed: int = 0, *, vocabulary: int = 48, longest: int = 30) -> list[Group]:
    """Four answers each, of uneven lengths and two policy versions, with rewards 0 and 1."""
    rng = np.random.default_rng(seed)
    found: list[Group] = []
    for group in range(count):
        prompt = Segment.given(rng.integers(0, vocabulary, rng.integers(3, 9)))
        trajectories: list[Trajectory] = []
        for sample in range(4):
            parts = [rng.integers(1, 12), rng.integers(1, longest)]
            answer = [
                Segment.sampled(rng.integers(0, vocabulary, n), rng.uniform(-4.5, -3, n), version)
                for version, n in enumerate(parts)
            ]
            trajectories.append(
                Trajectory(
                    slot=Slot(group, sample),
                    prompt="p",
                    segments=(prompt, *answer),
                    reward=float(sample % 2),
                    finish="stop",
                    started=0.0,
                    finished=1.0,
                    engine="e",
                )
            )
        found.append(Group(id=group, trajectories=tuple(trajectories)))
    return found


def gradients_of(learner: Learner) -> list[Tensor]:
    """What has been accumulated, in fp32."""
    own = learner.optimizer if isinstance(learner.optimizer, AdamW) else None
    found = [p.grad if own is None else own.gradient(p) for p in learner.model.parameters() if p.requires_grad]
    return [gradient for gradient in found if gradient is not None]
