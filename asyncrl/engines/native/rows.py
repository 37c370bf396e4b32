"""What engines with a BatchTable share: requests in rows, counters, and the end of answers."""

from math import isnan

import msgspec

from asyncrl.config.drafter import DrafterSettings, Strategy
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.drafting.bandit import Range
from asyncrl.engines.cooperative import CooperativeEngine, Job
from asyncrl.engines.native.batch_table import BatchTable, Ended
from asyncrl.engines.native.speculation.source import Chooser, Forceable, Tally, build_chooser
from asyncrl.errors import EngineError
from asyncrl.types import EngineStats, Request, Segment


class RowEngine(CooperativeEngine):
    def __init__(self, max_length: int, *, name: str, version: int) -> None:
        super().__init__(name, version)
        self._max_length = max_length
        self._generated = self._prefilled = self._cached = self._reprefilled = 0
        self.kv_tokens = 0
        """Tokens whose keys and values there is room for, where that bounds it, once it has started."""

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._jobs) - len(self._waiting),
            waiting=len(self._waiting),
            version=self._version,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            kv_tokens=self.kv_tokens,
            reprefilled_tokens=self._reprefilled,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
        )

    def _serve_model(self, vocabulary: int, slots: BatchTable) -> None:
        """What `_open` found."""
        self._vocabulary, self._slots = vocabulary, slots

    def _check(self, request: Request) -> None:
        if len(request.tokens) >= self._max_length:
            raise EngineError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room for an answer within "
                f"engine.max_length={self._max_length}; shorten the prompt or raise engine.max_length"
            )
        if min(request.tokens) < 0 or max(request.tokens) >= self._vocabulary:
            raise EngineError(
                f"request {request.id}: token ids must be in 0..{self._vocabulary - 1}, the model's vocabulary"
            )

    def _record(self, sampled: int, prefilled: int, ended: Ended, logprob_sum: float) -> None:
        """Count a step, and finish the answers that end with it."""
        if isnan(logprob_sum):
            raise EngineError(f"the model's logits are NaN under version {self._version}: its weights have diverged")
        self._generated += sampled
        self._prefilled += prefilled
        rows, stopped = ended
        jobs = [self._slots.jobs[row] for row in rows]  # first all of them: finishing one moves another's row
        for job, by_stop in zip(jobs, stopped, strict=True):
            self._finish(job, "stop" if by_stop else "length")

    def _take_row(self, job: Job) -> Segment:
        tokens, logprobs, routes = self._slots.take_segment(job.row)
        return Segment.sampled(tokens, logprobs, self._version, routes)


class SpeculatingEngine(RowEngine):
    """The native engines on CPU and GPU: with a drafter, a chooser says how much to draft."""

    def __init__(
        self, settings: Settings, drafter: DrafterSettings, *, name: str, version: int, chooser: Chooser | None = None
    ) -> None:
        super().__init__(settings.max_length, name=name, version=version)
        self.settings, self._drafter = settings, drafter
        self._chooser = Forceable(chooser or build_chooser(drafter))
        self._tally = Tally()

    async def force_depth(self, depth: int | None) -> None:
        """Draft so many tokens, whatever pays; None: the chooser chooses again. For measurements."""
        self._chooser.forced = None if depth is None else Strategy(depth=depth)

    def stats(self) -> EngineStats:
        tally = self._tally
        return msgspec.structs.replace(
            super().stats(),
            drafts=tally.drafts,
            drafted_tokens=tally.drafted_tokens,
            accepted_by_position=tuple(tally.accepted),
            speculation=self._chooser.report(),
        )

    def learned(self) -> list[Range]:
        return self._chooser.learned()
