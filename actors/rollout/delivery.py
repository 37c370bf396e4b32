"""From an engine to the buffer: `DeliveryQueue` for finished completions, `ProgressReporter` for unfinished ones."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from actors.buffer import BufferActor
from actors.reward import RewardActor
from actors.runtime.background import retrieve_exception
from actors.teacher import Judgement, Taught, Teachers
from asyncrl.data.arrow import encode
from asyncrl.fleet.concurrency import GATHER_SECONDS
from asyncrl.judges.store import Parked
from asyncrl.observe.diagnosis.snapshot import Stage
from asyncrl.types import Segment, Slot, Trajectory
from asyncrl.user_code.protocol import RewardFailure, RewardInput, RewardResult
from asyncrl.user_code.score import Score, rewarded
from asyncrl.user_code.stages import Sample

EVERY_SECONDS = 1.0
"""Least time between two reports of one engine: versions may follow each other faster than a crash is worth."""
CALLS_PER_SECOND = 16
"""Reports that the engines of a run make together, at most."""


class DeliveryQueue:
    """Scores finished completions and appends them to the buffer, a few at a time."""

    def __init__(
        self,
        buffer: BufferActor,
        reward: RewardActor,
        stage: Callable[[Slot, Stage], None],
        gather_s: float = GATHER_SECONDS,
        *,
        staged: bool = False,
        compared: bool = False,
        teachers: Teachers | None = None,
    ) -> None:
        """`stage` is told of each answer that has its reward and waits for a teacher, or goes into the buffer.
        `staged`: by way of the user's stages; `compared`: the reward compares it with others and passes it on;
        `teachers` judge at the same time."""
        self._buffer, self._reward, self._stage, self._gather_s = buffer, reward, stage, gather_s
        self._staged, self._compared, self._teachers = staged, compared, teachers
        self._waiting: list[_Finished] = []
        self._flushing: asyncio.Task[None]
        self._ready: list[bytes] = []
        self._storing: asyncio.Task[None]
        self._one_call = asyncio.Lock()
        self.closed = False
        """Whether the fleet is being closed, rewards too: a sample that gets none has not failed. A resumed run asks
        again."""

    async def close(self) -> None:
        """Returns when no call to the buffer is under way."""
        self.closed = True
        async with self._one_call:
            pass

    async def submit(self, judged: RewardInput, trajectory: Trajectory, score: Score | None = None) -> None:
        """Join the next batch; its failure is that of every answer in it. `score` is the reward, if there is one
        already."""
        if not self._waiting:
            self._flushing = asyncio.create_task(self._flush_soon())
            self._flushing.add_done_callback(retrieve_exception)
        self._waiting.append(_Finished(judged, trajectory, score))
        await asyncio.shield(self._flushing)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(self._gather_s)
        batch, self._waiting = self._waiting, []
        await self._flush(batch)

    async def _flush(self, batch: Sequence["_Finished"]) -> None:
        results, judgements = await asyncio.gather(self._rewards(batch), self._judge(batch))
        if self.closed:
            return
        payloads, parked = list[bytes](), list[Parked]()
        for result, judgement, finished in zip(results, judgements, batch, strict=True):
            trajectory = finished.trajectory
            self._stage(trajectory.slot, "append")
            if isinstance(result, RewardFailure):
                await self._buffer.fail(trajectory.slot, result.reason, trajectory.sampled_tokens)
            elif isinstance(judgement, RewardFailure):
                await self._buffer.fail(trajectory.slot, judgement.reason, trajectory.sampled_tokens)
            else:
                taught = msgspec.structs.replace(
                    trajectory, teacher_logprob_bytes=judgement.logprobs, teacher_top_k_bytes=judgement.top_k
                )
                payload = encode(rewarded(taught, result))
                if self._is_compared(finished):
                    parked.append(Parked(trajectory.slot, finished.judged, payload))
                else:
                    payloads.append(payload)
        if parked:
            await self._reward.park(parked)
        if payloads:
            await self._store(payloads)

    def _is_compared(self, finished: "_Finished") -> bool:
        """An episode that ended with a reward of its own is not."""
        return self._compared and finished.score is None

    async def _rewards(self, batch: Sequence["_Finished"]) -> list[RewardResult]:
        results = await self._score(batch)
        if self._staged and not self.closed:
            results = await self._pass_stages(batch, results)
        if self._teachers is not None:
            for _, trajectory, _ in batch:
                self._stage(trajectory.slot, "teacher")
        return results

    async def _judge(self, batch: Sequence["_Finished"]) -> list[Judgement]:
        """What the teachers say, if there are any."""
        if self._teachers is None:
            return [Taught()] * len(batch)
        return await self._teachers.judge([trajectory for _, trajectory, _ in batch])

    async def _score(self, batch: Sequence["_Finished"]) -> list[RewardResult]:
        unscored = [each.judged for each in batch if each.score is None]
        scores = iter(await self._reward.score(unscored) if unscored else ())
        return [next(scores) if each.score is None else each.score for each in batch]

    async def _pass_stages(self, batch: Sequence["_Finished"], results: list[RewardResult]) -> list[RewardResult]:
        """Those with a reward go on to the stages; those that are compared do so after it."""
        passing = {
            index: result
            for index, result in enumerate(results)
            if not (isinstance(result, RewardFailure) or self._is_compared(batch[index]))
        }
        if not passing:
            return results
        samples = [_sample(batch[index], result) for index, result in passing.items()]
        for index, result in zip(passing, await self._reward.stage(samples), strict=True):
            results[index] = result
        return results

    async def _store(self, payloads: list[bytes]) -> None:
        """One call to the buffer at a time: what is scored meanwhile goes with the next. So calls grow larger, and not
        more, when the buffer has many engines to serve."""
        if not self._ready:
            self._storing = asyncio.create_task(self._store_next())
            self._storing.add_done_callback(retrieve_exception)
        self._ready += payloads
        await asyncio.shield(self._storing)

    async def _store_next(self) -> None:
        async with self._one_call:
            ready, self._ready = self._ready, []
            if not self.closed:
                await self._buffer.append(ready)


class _Finished(NamedTuple):
    judged: RewardInput
    trajectory: Trajectory
    score: Score | None


def _sample(finished: _Finished, reward: float | Score) -> Sample:
    judged, trajectory = finished.judged, rewarded(finished.trajectory, reward)
    return Sample(judged.prompt, judged.completion, judged.answer, trajectory, judged.turns)


class ProgressReporter:
    """Tells how far unfinished completions are, in case the engine's process dies. Nobody waits for it."""

    def __init__(self, note: Callable[[dict[Any, tuple[Segment, ...]]], Awaitable[object]], engines: int) -> None:
        """`note`: of the buffer, or of the gateway."""
        self._tell = note
        self._every_s = max(EVERY_SECONDS, engines / CALLS_PER_SECOND)
        self._noting: asyncio.Task[None] | None = None
        self._noted = float("-inf")

    def begin(self, begun: Mapping[Any, tuple[Segment, ...]]) -> None:
        """An update has cut off what runs: `begun`, as it will be then, is noted soon."""
        if self._noting is None or self._noting.done():
            self._noting = asyncio.create_task(self._note(begun))
            self._noting.add_done_callback(retrieve_exception)

    async def _note(self, begun: Mapping[Any, tuple[Segment, ...]]) -> None:
        # What the update cut off is still on its way to its readers.
        await asyncio.sleep(max(GATHER_SECONDS, self._noted + self._every_s - time.monotonic()))
        self._noted = time.monotonic()
        if begun:
            await self._tell(dict(begun))
