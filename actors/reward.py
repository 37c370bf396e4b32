"""The reward actor: scores completions, and runs the user's environments and stages."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from asyncrl.config.user_code import Environment, Reward, Stages, stages
from asyncrl.drop_reasons import stage_reason
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.user_code.environments import Conversation
from asyncrl.user_code.failures import Failures
from asyncrl.user_code.in_process import AnyPool, make_pool
from asyncrl.user_code.pool import check_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult, RewardStats
from asyncrl.user_code.score import Score
from asyncrl.user_code.stages import Drop, Sample


class RewardActor:
    """Scores completions with the user's functions, in processes of their own that can be killed."""

    IDEMPOTENT = frozenset({"failures", "stats"})
    """Not what calls the user's functions: they may do something that must not be done twice."""

    def __init__(self, settings: Reward, environment: Environment | None = None, after: Stages = ()) -> None:
        """`after` the reward come these stages."""
        self._settings = settings
        self._pool = make_pool(settings)
        self._environment = environment or Environment()
        self._answering = make_pool(self._environment)
        self._stages = [(stage, make_pool(stage)) for stage in stages(after)]
        self._activity = Activity()

    async def start(self) -> None:
        """Raise ConfigError if a function cannot be imported here."""
        others = [self._environment] if self._environment.on else []
        for settings in (self._settings, *others, *(stage for stage, _ in self._stages)):
            await asyncio.to_thread(check_function, settings)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        return await self._activity.during(f"scoring {len(inputs)} samples", self._pool.score(inputs))

    async def respond(self, talk: Conversation) -> str | RewardFailure | None:
        """What the environment says next; None when the conversation is over."""
        (said,) = await self._activity.during("a turn of the environment", self._answering.score([talk]))
        return said

    async def stage(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The rewards with which samples leave the last stage, or why they do not come so far."""
        results: list[RewardResult] = [Score(sample.reward, sample.parts) for sample in samples]
        came = time.monotonic()
        for stage, pool in self._stages:
            passing = {i: result for i, result in enumerate(results) if not isinstance(result, RewardFailure)}
            if not passing:
                break
            given = [samples[index].rewarded(result) for index, result in passing.items()]
            (verdicts,) = await self._activity.during(f"stage {stage.function}", pool.score([given]))
            if isinstance(verdicts, RewardFailure):
                verdicts = [verdicts] * len(passing)
            for index, verdict in zip(passing, verdicts, strict=True):
                results[index] = _dropped(verdict) if isinstance(verdict, Drop) else verdict
        self._pool.stats.waited_seconds += len(samples) * (time.monotonic() - came)  # as long as a slow reward would
        return results

    async def failures(self) -> Failures:
        """The first failures of each function, and whether one of them fails always."""
        records = [pool.record for pool in self._pools]
        first = tuple(failure for record in records for failure in record.first)
        return Failures(first=first, always=next(filter(None, (record.always for record in records)), ""))

    @property
    def _pools(self) -> list[AnyPool]:
        return [self._pool, self._answering, *(pool for _, pool in self._stages)]

    async def stats(self) -> RewardStats:
        return self._pool.stats

    def situation(self) -> Situation:
        said, pool = self._activity.situation(), self._pool
        failures = {failure.reason: failure.message for each in self._pools for failure in each.record.first}
        return msgspec.structs.replace(
            said, judging=pool.judging, queued=pool.queued, dropped=pool.failing, failures=failures
        )

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools))


def _dropped(verdict: Drop) -> RewardFailure:
    return RewardFailure(stage_reason(verdict.reason), "a stage of the user's has dropped it")
