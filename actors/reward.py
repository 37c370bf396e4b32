"""The reward actor: scores completions, and runs the user's environments and stages."""

import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec

from asyncrl.config.user_code import Called, Environment, Reward, Stages, stages
from asyncrl.drop_reasons import stage_reason
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.user_code.environments import Conversation
from asyncrl.user_code.in_process import make_pool
from asyncrl.user_code.pool import check_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult, RewardStats
from asyncrl.user_code.score import Score
from asyncrl.user_code.stages import Drop, Sample


class RewardActor:
    """Scores completions with the user's functions, in processes of their own that can be killed."""

    def __init__(self, settings: Reward, environment: Environment | None = None, after: Stages = ()) -> None:
        """`after` the reward come these stages."""
        self._settings = settings
        self._pool = make_pool(settings)
        self._environment = environment or Environment()
        self._answering = make_pool(self._environment)
        self._stages = [(stage, make_pool(stage)) for stage in stages(after)]
        self._told: set[str] = set()
        self._closed = False
        self._activity = Activity()

    async def start(self) -> None:
        """Raise ConfigError if a function cannot be imported here."""
        others = [self._environment] if self._environment.on else []
        for settings in (self._settings, *others, *(stage for stage, _ in self._stages)):
            await asyncio.to_thread(check_function, settings)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        results = await self._activity.during(f"scoring {len(inputs)} samples", self._pool.score(inputs))
        for result in results:
            if isinstance(result, RewardFailure):
                self._tell(self._settings, result)
        return results

    async def respond(self, talk: Conversation) -> str | RewardFailure | None:
        """What the environment says next; None when the conversation is over."""
        (said,) = await self._activity.during("a turn of the environment", self._answering.score([talk]))
        if isinstance(said, RewardFailure):
            self._tell(self._environment, said)
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
                self._tell(stage, verdicts)
                verdicts = [verdicts] * len(passing)
            for index, verdict in zip(passing, verdicts, strict=True):
                results[index] = _dropped(verdict) if isinstance(verdict, Drop) else verdict
        self._pool.stats.waited_seconds += len(samples) * (time.monotonic() - came)  # as long as a slow reward would
        return results

    def _tell(self, settings: Called, failure: RewardFailure) -> None:
        """Say why at the first sample of each kind that is lost: a run in which all are lost never comes to a step."""
        if failure.reason not in self._told and not self._closed:
            self._told.add(failure.reason)
            print(f"{settings.function}: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)

    async def stats(self) -> RewardStats:
        return self._pool.stats

    def situation(self) -> Situation:
        said = self._activity.situation()
        pool = self._pool
        return msgspec.structs.replace(said, judging=pool.judging, queued=pool.queued, dropped=pool.failing)

    async def close(self) -> None:
        self._closed = True
        pools = [self._pool, self._answering, *(pool for _, pool in self._stages)]
        await asyncio.gather(*(pool.close() for pool in pools))


def _dropped(verdict: Drop) -> RewardFailure:
    return RewardFailure(stage_reason(verdict.reason), "a stage of the user's has dropped it")
