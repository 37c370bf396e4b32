"""Groups to train on, and what a learner has made of them."""

import numpy as np
from torch import Tensor

from asyncrl.training.adamw import AdamW
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory


def make_groups(count: int, seed: int = 0, *, vocabulary: int = 48, longest: int = 30) -> list[Group]:
    """Four answers each, of uneven lengths and two policy versions, with rewards 0 and 1, and routes for the tiny
    mixture of experts, which a dense model does not look at."""
    rng, choice = np.random.default_rng(seed), np.random.default_rng(seed)
    found: list[Group] = []
    for group in range(count):
        prompt = Segment.given(rng.integers(0, vocabulary, rng.integers(3, 9)))
        prompt_routes = _routes(choice, len(prompt))
        trajectories: list[Trajectory] = []
        for sample in range(4):
            parts = [rng.integers(1, 12), rng.integers(1, longest)]
            routes = [prompt_routes + _routes(choice, parts[0] - 1), _routes(choice, parts[1])]
            answer = [
                Segment.sampled(rng.integers(0, vocabulary, n), rng.uniform(-4.5, -3, n), version, routes[version])
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


def _routes(rng: np.random.Generator, tokens: int) -> bytes:
    """Two of eight experts in two layers."""
    return rng.random((tokens, 2, 8)).argsort(-1)[..., :2].astype(np.uint8).tobytes()


def gradients_of(learner: Learner) -> list[Tensor]:
    """What has been accumulated, in fp32."""
    own = learner.optimizer if isinstance(learner.optimizer, AdamW) else None
    found = [p.grad if own is None else own.gradient(p) for p in learner.model.parameters() if p.requires_grad]
    return [gradient for gradient in found if gradient is not None]
