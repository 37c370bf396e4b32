"""The teacher actor: what another model thinks of the tokens that the policy has sampled.

    finished trajectories of all engines -> as many as one forward takes -> log-probabilities of their sampled tokens

It has no state: what a process that died was asked, the one after it is asked again.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from actors.runtime.background import retrieve_exception
from asyncrl.config import Run
from asyncrl.config.distillation import Teacher
from asyncrl.drop_reasons import DropReason
from asyncrl.observe.diagnosis.activity import Activity
from asyncrl.observe.diagnosis.snapshot import Situation
from asyncrl.training.teacher import Said, TeacherModel
from asyncrl.types import Floats, Trajectory
from asyncrl.user_code.failures import ENOUGH, Failures, FunctionFailure
from asyncrl.user_code.protocol import RewardFailure, describe


class Taught(NamedTuple):
    """What a trajectory keeps of its teachers (`asyncrl.types.Trajectory`)."""

    logprobs: bytes = b""
    top_k: bytes = b""


Judgement = Taught | RewardFailure
"""Or why there is none."""


class TeacherStats(msgspec.Struct, kw_only=True):
    """Counters since start."""

    samples: int = 0
    tokens: int = 0
    """Sampled tokens that were judged."""
    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    """From being handed over, added up over the samples: waiting for the forward before, and the own one."""


class TeacherActor:
    """Owns one teacher."""

    def __init__(self, run: Run, settings: Teacher, vocabulary: int | None = None) -> None:
        """One of the run's, with the path that it has on this machine; `vocabulary` is the student's."""
        torch.set_num_threads(run.trainer.threads)
        self._settings = settings
        self._token_budget = run.trainer.token_budget
        self._model = TeacherModel(settings, run, vocabulary)
        self._waiting: list[_Question] = []
        self._working: asyncio.Task[None] | None = None
        self._stats = TeacherStats()
        self._failed = 0
        self._first: FunctionFailure | None = None
        self._activity = Activity()

    async def judge(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """What it says of the tokens of each; waits while others are computed, which then may come together."""
        answers: asyncio.Future[list[Judgement]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Question(trajectories, answers, time.monotonic()))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
            self._working.add_done_callback(retrieve_exception)
        return await answers

    async def _work(self) -> None:
        while self._waiting:
            questions = self._next()
            trajectories = [each for question in questions for each in question.trajectories]
            begun = time.monotonic()
            with self._activity.doing(f"log-probabilities of {len(trajectories)} samples"):
                # In a thread: what finishes meanwhile is taken in, and joins the next forward.
                found = iter(await asyncio.to_thread(self._judged, trajectories))
            ended = time.monotonic()
            self._stats.busy_seconds += ended - begun
            for question in questions:
                self._stats.waited_seconds += len(question.trajectories) * (ended - question.came)
                if not question.answers.done():  # nobody waits any longer
                    question.answers.set_result([next(found) for _ in question.trajectories])

    def _next(self) -> list["_Question"]:
        """As many as one forward takes, the first in any case."""
        taken: list[_Question] = []
        tokens = 0
        while self._waiting and (not taken or tokens + self._waiting[0].tokens <= self._token_budget):
            taken.append(self._waiting.pop(0))
            tokens += taken[-1].tokens
        return taken

    def _judged(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Where some have no answer each is asked for alone: one bad sample costs no other."""
        try:
            found = self._model.judge(trajectories)
        except Exception:  # the same of those that are to blame
            found = []
        if len(found) == len(trajectories) and not any(each.broken for each in found):
            return [self._counted(each) for each in found]
        return [self._alone(each) for each in trajectories]

    def _alone(self, trajectory: Trajectory) -> Judgement:
        try:
            (found,) = self._model.judge([trajectory])
            if broken := found.broken:
                raise ArithmeticError(f"{broken} of {len(found.logprobs)} log-probabilities are not finite")
            return self._counted(found)
        except Exception as error:  # of any kind, down to a device without memory
            message, source = describe(error)
            slot = trajectory.slot
            self._failed += 1
            self._first = self._first or FunctionFailure(
                function=self._settings.path,
                field="teachers",
                reason=DropReason.TEACHER_ERROR,
                message=f"sample {slot.group}/{slot.sample}: {message}",
                source=source,
            )
            return RewardFailure(DropReason.TEACHER_ERROR, message, source)

    def _counted(self, found: Said) -> Taught:
        self._stats.samples += 1
        self._stats.tokens += len(found.logprobs)
        return Taught(found.logprobs.tobytes(), found.top_k.tobytes())

    async def stats(self) -> TeacherStats:
        return self._stats

    async def failures(self) -> Failures:
        """The first failure, and whether there was nothing else."""
        if self._first is None:
            return Failures()
        always = f"teacher {self._settings.path} has failed on every sample so far ({self._failed}): "
        fails = not self._stats.samples and self._failed >= ENOUGH
        return Failures(first=(self._first,), always=always + self._first.message if fails else "")

    def situation(self) -> Situation:
        return msgspec.structs.replace(self._activity.situation(), queued=len(self._waiting))

    async def close(self) -> None:
        """Returns when nothing is computed any more. Who still waits belongs to an engine that is closed."""
        over = RewardFailure(DropReason.TEACHER_ERROR, "the run has ended")
        for question in self._waiting:
            question.answers.set_result([over] * len(question.trajectories))
        self._waiting.clear()
        if self._working is not None:
            await asyncio.wait([self._working])


class _Question(NamedTuple):
    trajectories: Sequence[Trajectory]
    answers: asyncio.Future[list[Judgement]]
    came: float

    @property
    def tokens(self) -> int:
        return sum(len(segment) for trajectory in self.trajectories for segment in trajectory.segments)


class Teachers:
    """The teachers of a run together, as an engine's delivery asks them."""

    def __init__(self, settings: Sequence[Teacher], actors: Sequence[TeacherActor]) -> None:
        self._actors = actors
        weight_N = np.array([each.weight for each in settings])
        self._weight_N = (weight_N / weight_N.sum()).astype(np.float32)

    async def judge(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """The weighted mean of their log-probabilities, and the likeliest tokens of the first, which is the only one
        where these are asked for; a failure where one of them fails."""
        bare = [_without_routes(each) for each in trajectories]
        answers = await asyncio.gather(*(actor.judge(bare) for actor in self._actors))
        return [self._mean(of_one) for of_one in zip(*answers, strict=True)]

    def _mean(self, answers: Sequence[Judgement]) -> Judgement:
        found: list[Floats] = []
        top_k: list[bytes] = []
        for answer in answers:
            if isinstance(answer, RewardFailure):
                return answer
            found.append(np.frombuffer(answer.logprobs, np.float32))
            top_k.append(answer.top_k)
        return Taught((self._weight_N @ np.stack(found)).astype(np.float32).tobytes(), top_k[0])


def _without_routes(trajectory: Trajectory) -> Trajectory:
    """Those are the student's, and would travel for nothing."""
    if not trajectory.route_bytes:
        return trajectory
    segments = tuple(msgspec.structs.replace(each, route_bytes=b"") for each in trajectory.segments)
    return msgspec.structs.replace(trajectory, segments=segments)
