"""Held-out evaluation on the rollout engines, sampled and greedy, by problem size."""

import asyncio
from collections.abc import Sequence

import msgspec

from actors.rollout.actor import Judged, RolloutActor
from asyncrl.config import Run
from asyncrl.tasks.base import Task
from asyncrl.types import Prompt

SIZE_BUCKETS = ((1, 3), (4, 6), (7, 12), (13, 10**9))


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the held-out prompts with a correct completion."""

    sampled: float
    greedy: float
    by_size: dict[str, float]
    """Sampled share by problem size, for instance `4-6`."""
    reward: float
    """Mean reward of the sampled completions; above `sampled` where rewards are graded."""
    median_tokens: float
    p95_tokens: float
    max_tokens: int
    by_source: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Sampled share by source, where the task mixes several."""


async def evaluate(run: Run, rollouts: Sequence[RolloutActor], task: Task) -> Scores | None:
    """Score the held-out prompts, or None when the run asks for none."""
    prompts = [task.prompt("held_out", index) for index in range(run.evaluation.prompts)]
    if not prompts:
        return None
    sampled, greedy = await asyncio.gather(
        _judge(rollouts, prompts, greedy=False, seed=run.seed),
        _judge(rollouts, prompts, greedy=True, seed=run.seed),
    )
    tokens = sorted(judged.tokens for judged in sampled)
    return Scores(
        sampled=_share(run, sampled),
        greedy=_share(run, greedy),
        by_size=_by_size(run, prompts, sampled),
        by_source=_by_source(run, prompts, sampled),
        reward=sum(judged.reward for judged in sampled) / len(sampled),
        median_tokens=tokens[len(tokens) // 2],
        p95_tokens=tokens[int(len(tokens) * 0.95)],
        max_tokens=tokens[-1],
    )


async def _judge(rollouts: Sequence[RolloutActor], prompts: list[Prompt], *, greedy: bool, seed: int) -> list[Judged]:
    """Distribute the prompts over the replicas, and return the results in order."""
    count = len(rollouts)
    parts = await asyncio.gather(
        *(rollout.evaluate(prompts[i::count], greedy=greedy, seed=seed) for i, rollout in enumerate(rollouts))
    )
    return [parts[index % count][index // count] for index in range(len(prompts))]


def _by_size(run: Run, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> dict[str, float]:
    shares: dict[str, float] = {}
    pairs = list(zip(prompts, judged, strict=True))
    for low, high in SIZE_BUCKETS:
        inside = [(prompt.size, each) for prompt, each in pairs if low <= prompt.size <= high]
        if inside:
            shares[f"{low}-{max(size for size, _ in inside)}"] = _share(run, [each for _, each in inside])
    return shares


def _by_source(run: Run, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> dict[str, float]:
    found: dict[str, list[Judged]] = {}
    for prompt, each in zip(prompts, judged, strict=True):
        if prompt.source:
            found.setdefault(prompt.source, []).append(each)
    return {source: _share(run, found[source]) for source in sorted(found)}


def _share(run: Run, judged: Sequence[Judged]) -> float:
    """Of completions that are correct."""
    return sum(each.reward >= run.evaluation.right_from for each in judged) / len(judged)
