"""Held-out evaluation on the rollout engines, sampled and greedy, by problem size."""

import asyncio
from collections.abc import Sequence

import msgspec

from actors.rollout import Judged, RolloutActor
from asyncrl.config import Run
from asyncrl.tasks.base import Task
from asyncrl.types import Prompt

SIZE_BUCKETS = ((1, 3), (4, 6), (7, 12), (13, 10**9))


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward on held-out prompts."""

    sampled: float
    greedy: float
    by_size: dict[str, float]
    """Sampled score by problem size, for instance `4-6`."""
    median_tokens: float
    p95_tokens: float
    max_tokens: int


async def evaluate(run: Run, rollouts: Sequence[RolloutActor], task: Task) -> Scores | None:
    """Score the held-out prompts, or None when the run asks for none."""
    prompts = [task.prompt("held_out", index) for index in range(run.evaluation.prompts)]
    if not prompts:
        return None
    sampled, greedy = await asyncio.gather(
        _answers(rollouts, prompts, greedy=False, seed=run.seed),
        _answers(rollouts, prompts, greedy=True, seed=run.seed),
    )
    tokens = sorted(judged.tokens for judged in sampled)
    return Scores(
        sampled=_mean([judged.reward for judged in sampled]),
        greedy=_mean([judged.reward for judged in greedy]),
        by_size=_by_size(prompts, sampled),
        median_tokens=tokens[len(tokens) // 2],
        p95_tokens=tokens[int(len(tokens) * 0.95)],
        max_tokens=tokens[-1],
    )


async def _answers(rollouts: Sequence[RolloutActor], prompts: list[Prompt], *, greedy: bool, seed: int) -> list[Judged]:
    """Share the prompts out over the replicas and put the answers back in order."""
    count = len(rollouts)
    parts = await asyncio.gather(
        *(rollout.evaluate(prompts[i::count], greedy=greedy, seed=seed) for i, rollout in enumerate(rollouts))
    )
    return [parts[index % count][index // count] for index in range(len(prompts))]


def _by_size(prompts: Sequence[Prompt], judged: Sequence[Judged]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for low, high in SIZE_BUCKETS:
        rewards = [answer.reward for prompt, answer in zip(prompts, judged, strict=True) if low <= prompt.size <= high]
        if rewards:
            scores[f"{low}-{max(p.size for p in prompts if low <= p.size <= high)}"] = _mean(rewards)
    return scores


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
