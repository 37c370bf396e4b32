"""The reward actor: scores completions, asks the judge, and runs the user's environments and stages."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.buffer import BufferActor
from asyncrl.config.user_code import Environment, Reward, Stages, stages
from asyncrl.data.arrow import decode, encode
from asyncrl.drop_reasons import stage_reason
from asyncrl.judges.judge import ModelJudge, Verdict
from asyncrl.judges.pairs import PairJudge
from asyncrl.judges.store import JudgeStats, Parked
from asyncrl.observe.diagnosis.activity import SHOWN, Activity
from asyncrl.observe.diagnosis.snapshot import SampleAt, Situation
from asyncrl.types import Slot
from asyncrl.user_code.environments import Conversation
from asyncrl.user_code.failures import Failures
from asyncrl.user_code.in_process import AnyPool, make_pool
from asyncrl.user_code.pool import check_function
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult, RewardStats
from asyncrl.user_code.score import Score, rewarded
from asyncrl.user_code.stages import Drop, Sample


class RewardActor:
    """Scores completions with the user's functions, in processes of their own that can be killed, and with a judge."""

    IDEMPOTENT = frozenset({"failures", "stats", "judge_stats", "park", "parked"})
    """Not what calls the user's functions: they may do something that must not be done twice."""

    def __init__(
        self,
        settings: Reward,
        environment: Environment | None = None,
        after: Stages = (),
        verdicts: Path | None = None,
        suites: Mapping[str, Reward] | None = None,
        buffer: BufferActor | None = None,
    ) -> None:
        """`after` the reward come these stages; `verdicts`: where the judge's are kept. `suites` of evaluations have
        rewards of their own, by their names. `buffer` gets completions that were compared."""
        self._settings, self._verdicts, self._buffer = settings, verdicts, buffer
        self._judge: ModelJudge | None = None
        self._pairs: PairJudge | None = None
        self._suites = {name: (each, make_pool(each)) for name, each in (suites or {}).items()}
        self._pool = make_pool(settings)
        self._environment = environment or Environment()
        self._answering = make_pool(self._environment)
        self._stages = [(stage, make_pool(stage)) for stage in stages(after)]
        self._activity = Activity()

    async def start(self) -> None:
        """Raise ConfigError if a function cannot be imported here, or the judge cannot be asked from here."""
        functions = [each for each in (self._settings, self._environment) if each.function]
        own = [each for each, _ in (*self._stages, *self._suites.values())]
        for settings in (*functions, *own):
            await asyncio.to_thread(check_function, settings)
        self._opened_judge()

    def _opened_judge(self) -> ModelJudge | None:
        """Also in an actor that Ray has made anew, which nobody starts."""
        if self._judge is None and self._settings.judge.on:
            self._judge = judge = ModelJudge(self._settings.judge, self._verdicts)
            if self._settings.judge.pairs and self._buffer is not None:
                self._pairs = PairJudge(judge, self._settings.judge.pairs, self._buffer.awaited, self._compared)
        return self._judge

    async def score(self, inputs: Sequence[RewardInput], suite: str = "") -> list[RewardResult]:
        """By the reward of the run, or of a suite that has one."""
        scoring = self._suites[suite][1].score(inputs) if suite in self._suites else self._score(inputs)
        return await self._activity.during(f"scoring {len(inputs)} samples", scoring)

    async def _score(self, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        judge = self._opened_judge()
        if judge is None:
            return await self._pool.score(inputs)
        if self._settings.function:
            results: list[RewardResult] = await self._pool.score(inputs)
        else:
            results = [Score(0.0)] * len(inputs)
            self._pool.stats.judged += len(inputs)
        if self._settings.judge.pairs:
            return results  # to be parked, or of held-out completions, which have no group
        came = time.monotonic()
        results = await judge.score(inputs, results)
        self._pool.stats.waited_seconds += len(inputs) * (time.monotonic() - came)
        return results

    async def park(self, completions: Sequence[Parked]) -> None:
        """Keep completions that have the function's reward until they are compared with others of their groups. From
        here they go through the stages and into the buffer."""
        self._opened_judge()
        assert self._pairs is not None
        self._pairs.park(completions)

    async def parked(self, groups: Collection[int]) -> list[Slot]:
        """Which of their samples are here already: nobody needs to generate them."""
        self._opened_judge()
        return [] if self._pairs is None else self._pairs.parked(groups)

    async def _compared(self, parked: Parked, verdict: Verdict, waited_s: float) -> None:
        self._pool.stats.waited_seconds += waited_s
        assert self._buffer is not None
        assert self._judge is not None
        trajectory, result = decode(parked.trajectory), verdict
        if not isinstance(verdict, RewardFailure):
            own = Score(trajectory.reward, trajectory.parts)
            result = self._judge.added(trajectory.reward if self._settings.function and not own.parts else own, verdict)
        if self._stages and not isinstance(result, RewardFailure):
            judged = parked.given
            whole = rewarded(trajectory, result)
            (result,) = await self.stage([Sample(judged.prompt, judged.completion, judged.answer, whole, judged.turns)])
        if isinstance(result, RewardFailure):
            await self._buffer.fail(parked.slot, result.reason, trajectory.sampled_tokens)
        else:
            await self._buffer.append([encode(rewarded(trajectory, result))])

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
        if self._settings.judge.pairs:
            self._opened_judge()  # what an earlier process had parked is gone on with
        if self._pairs is not None:
            self._pairs.check()
        records = [pool.record for pool in self._pools]
        always = [record.always for record in records]
        if self._judge is not None:
            records.append(self._judge.record)
            always.append(self._judge.always)
        first = tuple(failure for record in records for failure in record.first)
        return Failures(first=first, always=next(filter(None, always), ""))

    @property
    def _pools(self) -> list[AnyPool]:
        return [self._pool, self._answering, *(pool for _, pool in (*self._stages, *self._suites.values()))]

    async def stats(self) -> RewardStats:
        return self._pool.stats

    async def judge_stats(self) -> JudgeStats | None:
        return None if self._judge is None else self._judge.stats

    def situation(self) -> Situation:
        said, pool, judge = self._activity.situation(), self._pool, self._judge
        records = [each.record for each in self._pools] + ([judge.record] if judge is not None else [])
        dropped = Counter(pool.failing) + Counter(judge.failing if judge is not None else {})
        return msgspec.structs.replace(
            said,
            judging=pool.judging,
            queued=pool.queued,
            dropped=dict(dropped),
            failures={failure.reason: failure.message for record in records for failure in record.first},
            judge=judge.situation if judge is not None else "",
            samples=self._parked_samples(),
        )

    def _parked_samples(self) -> tuple[SampleAt, ...]:
        now, waiting = time.monotonic(), self._pairs.waiting if self._pairs is not None else []
        oldest = sorted(waiting, key=lambda each: each.slot)[:SHOWN]
        return tuple(SampleAt(each.slot.group, each.slot.sample, "compare", now - each.since) for each in oldest)

    async def close(self) -> None:
        if self._pairs is not None:
            await self._pairs.close()
        await asyncio.gather(*(pool.close() for pool in self._pools))
        if self._judge is not None:
            await self._judge.close()


def _dropped(verdict: Drop) -> RewardFailure:
    return RewardFailure(stage_reason(verdict.reason), "a stage of the user's has dropped it")
