"""An engine without a model: lengths are log-normal, tokens random, both fixed by the request's seed.

It keeps the whole protocol (versions, pause, abort, resumed answers), so schedules and failures can be tried in
milliseconds. An answer is known when it is admitted; a step only moves a clock, whatever the number of rows.
"""

import heapq
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import FakeEngine as Settings
from asyncrl.config.precision import Fp8
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import CooperativeEngine, Job
from asyncrl.errors import EngineError
from asyncrl.types import EngineStats, Finish, Ints, Request, Segment, WeightAck, WeightManifest

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


def build_fake(
    model_path: Path,
    settings: Settings,
    drafter: DrafterSettings,
    *,
    name: str,
    precision: str = "fp32",
    fp8: Fp8 | None = None,
    tap: "RolloutTap | None" = None,
    learned: Sequence[Range] = (),
    adapted: Sequence[str] = (),
    routes: bool = False,
) -> "FakeEngine":
    """It has no model, so that only its own settings matter."""
    return FakeEngine(settings, name=name)


class _Answer(NamedTuple):
    tokens: Ints
    finish: Finish
    begin: int
    """Clock at which token 0 was still to come."""


class FakeEngine(CooperativeEngine):
    def __init__(self, settings: Settings, *, name: str, version: int = 0) -> None:
        super().__init__(name, version, settings.step_seconds)
        self._settings = settings
        self._answers: dict[Job, _Answer] = {}
        self._delivered: dict[Job, int] = {}
        self._due: list[tuple[int, int, Job]] = []
        self._clock = 0
        self._admitted = 0
        self._generated = self._prefilled = self._reprefilled = 0

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        again = 0
        if on_update == "recompute":
            again = sum(
                len(j.request.tokens) - j.request.resumed + self._clock - a.begin for j, a in self._answers.items()
            )
        self._reprefilled += again
        self._switch_version(manifest.version)
        return WeightAck(self.name, manifest.version, manifest.digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        self._require_serving(f"a drafter of version {manifest.version}")
        raise EngineError(f"engine {self.name} is a fake one and has no drafting head; use engine=native or vllm")

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._answers),
            waiting=len(self._waiting),
            version=self._version,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            reprefilled_tokens=self._reprefilled,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
        )

    def answer(self, request: Request) -> tuple[Ints, Finish]:
        """The whole answer that this request leads to, including what was sampled before it was resumed."""
        rng = np.random.default_rng(request.seed)
        spread = self._settings.sigma * rng.standard_normal()
        length = max(1, request.resumed + 1, round(self._settings.median_tokens * math.exp(spread)))
        stop = request.sampling.stop
        plain = _plain_tokens(self._settings.vocabulary, stop)
        tokens = plain[(rng.random(length) * len(plain)).astype(np.int64)]
        if length > request.sampling.max_tokens:
            return tokens[: request.sampling.max_tokens], "length"
        if stop:
            tokens[-1] = stop[0]
        return tokens, "stop"

    def _open(self) -> None: ...

    def _shut(self) -> None: ...

    def _check(self, request: Request) -> None: ...

    def _step(self) -> None:
        while self._waiting and len(self._answers) < self._settings.max_batch:
            self._admit(self._waiting.popleft())
        self._clock += 1
        self._generated += len(self._answers)
        while self._due and self._due[0][0] <= self._clock:
            job = heapq.heappop(self._due)[2]
            if job in self._answers:  # otherwise it was aborted on the way
                self._finish(job, self._answers[job].finish)

    def _admit(self, job: Job) -> None:
        tokens, finish = self.answer(job.request)
        done = job.request.resumed
        job.row = self._admitted = self._admitted + 1
        self._answers[job] = _Answer(tokens, finish, self._clock - done)
        self._delivered[job] = done
        self._prefilled += len(job.request.tokens)
        heapq.heappush(self._due, (self._clock + len(tokens) - done, job.row, job))

    def _take_row(self, job: Job) -> Segment:
        answer, begin = self._answers[job], self._delivered[job]
        end = self._delivered[job] = min(self._clock - answer.begin, len(answer.tokens))
        logprobs = np.full(end - begin, -math.log(self._settings.vocabulary), np.float32)
        return Segment.sampled(answer.tokens[begin:end], logprobs, self._version)

    def _release(self, job: Job) -> None:
        del self._answers[job], self._delivered[job]
        job.row = -1


@cache
def _plain_tokens(vocabulary: int, stop: tuple[int, ...]) -> Ints:
    """Those that end no answer."""
    return np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.array(stop, np.int32))
