"""Held-out evaluation on engines, sampled and greedy, by problem size and by suite."""

import asyncio
from collections.abc import Mapping, Sequence
from math import sqrt

import msgspec

from actors.rollout.actor import Judged, RolloutActor
from asyncrl.config import Run
from asyncrl.config.run import Reward
from asyncrl.tasks.base import Task
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt

SIZE_BUCKETS = ((1, 3), (4, 6), (7, 12), (13, 10**9))
SEEDS_APART = 1_000_003
"""Of the completions of one prompt."""
NORMAL_95 = 1.96


class SuiteScores(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of prompts and completions that are right."""

    sampled: float
    """Of all sampled completions, which is avg@k with `evaluation.samples=k`."""
    greedy: float
    reward: float
    """Mean reward of the sampled completions; above `sampled` where rewards are graded."""
    passed: float
    """Of prompts that have a right completion among those sampled: pass@k."""
    interval: float
    """Half the width of the 95 % confidence interval of `sampled`, over prompts."""


class Scores(SuiteScores, frozen=True, kw_only=True):
    """Those of the run's own held-out prompts."""

    by_size: dict[str, float]
    """Sampled share by problem size, for instance `4-6`."""
    median_tokens: float
    p95_tokens: float
    max_tokens: int
    suites: dict[str, SuiteScores] = {}
    by_source: dict[str, float] = {}
    """Sampled share by source, where the task mixes several."""

    def value(self, name: str) -> float:
        """Of a score, such as `sampled` or `SUITE.sampled`."""
        suite, _, score = name.rpartition(".")
        return getattr(self.suites[suite] if suite else self, score)


def suite_rewards(run: Run) -> Mapping[str, Reward]:
    """Those of suites that are not judged by the run's own."""
    found: dict[str, Reward] = {}
    for suite in run.evaluation.suites:
        if suite.reward is not None:
            found[suite.name] = suite.reward
        elif suite.task.judge:
            found[suite.name] = Reward(function=suite.task.judge)
    return found


async def evaluate(run: Run, rollouts: Sequence[RolloutActor], task: Task) -> Scores | None:
    """Score the held-out prompts, or None when the run asks for none."""
    prompts = [task.prompt("held_out", index) for index in range(run.evaluation.prompts)]
    if not prompts:
        return None
    sampled, greedy = await _judge(run, rollouts, prompts)
    suites: dict[str, SuiteScores] = {}
    for suite in run.evaluation.suites:
        source = make_task(suite.task, run.seed)
        others = [source.prompt("held_out", index) for index in range(suite.prompts)]
        suites[suite.name] = _scores(run, *await _judge(run, rollouts, others, suite.name))
    tokens = sorted(judged.tokens for each in sampled for judged in each)
    return Scores(
        **msgspec.structs.asdict(_scores(run, sampled, greedy)),
        by_size=_by_size(run, prompts, sampled),
        by_source=_by_source(run, prompts, sampled),
        median_tokens=tokens[len(tokens) // 2],
        p95_tokens=tokens[int(len(tokens) * 0.95)],
        max_tokens=tokens[-1],
        suites=suites,
    )


async def _judge(
    run: Run, rollouts: Sequence[RolloutActor], prompts: list[Prompt], suite: str = ""
) -> tuple[list[list[Judged]], list[Judged]]:
    """Of each prompt the sampled completions, and the greedy one."""
    seeds = [run.seed + number * SEEDS_APART for number in range(run.evaluation.samples)]
    greedy, *sampled = await asyncio.gather(
        _spread(rollouts, prompts, greedy=True, seed=run.seed, suite=suite),
        *(_spread(rollouts, prompts, greedy=False, seed=seed, suite=suite) for seed in seeds),
    )
    return [list(each) for each in zip(*sampled, strict=True)], greedy


async def _spread(
    rollouts: Sequence[RolloutActor], prompts: list[Prompt], *, greedy: bool, seed: int, suite: str
) -> list[Judged]:
    """Distribute the prompts over the replicas, and return the results in order."""
    count = len(rollouts)
    calls = [each.evaluate(prompts[i::count], greedy=greedy, seed=seed, suite=suite) for i, each in enumerate(rollouts)]
    parts = await asyncio.gather(*calls)
    return [parts[index % count][index // count] for index in range(len(prompts))]


def _scores(run: Run, sampled: Sequence[Sequence[Judged]], greedy: Sequence[Judged]) -> SuiteScores:
    right = [[_is_right(run, judged) for judged in each] for each in sampled]
    means, count = [sum(each) / len(each) for each in right], len(right)
    mean = sum(means) / count
    variance = sum((each - mean) ** 2 for each in means) / max(1, count - 1)
    return SuiteScores(
        sampled=mean,
        greedy=sum(_is_right(run, judged) for judged in greedy) / count,
        reward=sum(judged.reward for each in sampled for judged in each) / sum(map(len, sampled)),
        passed=sum(map(any, right)) / count,
        interval=NORMAL_95 * sqrt(variance / count),
    )


def _by_size(run: Run, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Judged]]) -> dict[str, float]:
    shares: dict[str, float] = {}
    pairs = list(zip(prompts, sampled, strict=True))
    for low, high in SIZE_BUCKETS:
        inside = [(prompt.size, each) for prompt, each in pairs if low <= prompt.size <= high]
        if inside:
            right = [_is_right(run, judged) for _, each in inside for judged in each]
            shares[f"{low}-{max(size for size, _ in inside)}"] = sum(right) / len(right)
    return shares


def _by_source(run: Run, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Judged]]) -> dict[str, float]:
    found: dict[str, list[bool]] = {}
    for prompt, each in zip(prompts, sampled, strict=True):
        if prompt.source:
            found.setdefault(prompt.source, []).extend(_is_right(run, judged) for judged in each)
    return {source: sum(found[source]) / len(found[source]) for source in sorted(found)}


def _is_right(run: Run, judged: Judged) -> bool:
    return judged.reward >= run.evaluation.right_from
