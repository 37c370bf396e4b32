"""Groups to train on, and what a learner has made of them."""

import msgspec
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


def with_likeliest(groups: list[Group], count: int, *, vocabulary: int = 48) -> list[Group]:
    """As if a teacher had judged them, which finds any tokens likely and leaves a tenth to all others."""
    rng = np.random.default_rng(5)

    def judged(trajectory: Trajectory) -> Trajectory:
        tokens = trajectory.sampled_tokens
        ids = rng.random((tokens, vocabulary)).argsort(-1)[:, :count].astype(np.int32)
        share = np.concatenate((0.9 * rng.dirichlet(np.ones(count), tokens), np.full((tokens, 1), 0.1)), 1)
        logprobs = np.log(share).astype(np.float32)
        return msgspec.structs.replace(
            trajectory,
            teacher_logprob_bytes=rng.uniform(-4.5, -3, tokens).astype(np.float32).tobytes(),
            teacher_top_k_bytes=np.concatenate((ids, logprobs.view(np.int32)), 1).tobytes(),
        )

    return [msgspec.structs.replace(g, trajectories=tuple(map(judged, g.trajectories))) for g in groups]


def _routes(rng: np.random.Generator, tokens: int) -> bytes:
    """Two of eight experts in two layers."""
    return rng.random((tokens, 2, 8)).argsort(-1)[..., :2].astype(np.uint8).tobytes()


def gradients_of(learner: Learner) -> list[Tensor]:
    """What has been accumulated, in fp32."""
    own = learner.optimizer if isinstance(learner.optimizer, AdamW) else None
    found = [p.grad if own is None else own.gradient(p) for p in learner.model.parameters() if p.requires_grad]
    return [gradient for gradient in found if gradient is not None]
