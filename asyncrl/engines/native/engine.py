"""Our own torch engine: continuous batching with one flat forward per step.

submit -> waiting -> Scheduler.plan -> Decoder over KvCache.attend -> sample -> SlotTable.record -> deltas

With a drafter, a step verifies drafts and makes the next ones (asyncrl.engines.native.speculation.speculator).
"""

from math import isnan
from pathlib import Path

import torch

from asyncrl.drafting.settings import DrafterSettings, EagleDrafter, NoDrafter
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import CooperativeEngine, Job
from asyncrl.engines.native.cache import KvCache
from asyncrl.engines.native.decoding import Decoding, Policy
from asyncrl.engines.native.published import Receiver
from asyncrl.engines.native.scheduler import Scheduler
from asyncrl.engines.native.slots import SlotTable
from asyncrl.engines.native.speculation.build import build_chooser, build_source, spare_slots
from asyncrl.engines.native.speculation.drafts import DraftTable
from asyncrl.engines.native.speculation.heads import HeadSource
from asyncrl.engines.native.speculation.source import Chooser
from asyncrl.engines.native.speculation.speculator import Speculator, Tally
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError
from asyncrl.types import EngineStats, Request, Segment, WeightAck, WeightManifest


class NativeEngine(CooperativeEngine):
    def __init__(
        self,
        model_path: Path,
        settings: Settings,
        drafter: DrafterSettings | None = None,
        *,
        name: str,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        chooser: Chooser | None = None,
    ) -> None:
        super().__init__(name, version)
        self.settings = settings
        self._drafter = drafter or NoDrafter()
        self._model_path, self._dtype = model_path, dtype
        self._generated = self._prefilled = self._reprefilled = 0
        self._chooser = chooser or build_chooser(self._drafter)
        self._tally = Tally()
        self._drafter_version = 0

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        digest = self._decoding.policy.load(manifest, Receiver(self.name, f"version {self._version}", "model"))
        self._switch_version(manifest.version)
        self._scheduler.forget_prompts()
        again = self._scheduler.recompute() if on_update == "recompute" else 0
        self._reprefilled += again
        return WeightAck(self.name, manifest.version, digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        self._require_serving(f"a drafter of version {manifest.version}")
        if self._head is None:
            tag = self._drafter.__struct_config__.tag
            raise EngineError(f"engine {self.name} has no drafting head, as drafter={tag}; use drafter=eagle or eagle3")
        digest = self._head.load(manifest, Receiver(self.name, f"drafter {self._drafter_version}", "drafting head"))
        self._drafter_version = manifest.version
        return WeightAck(self.name, manifest.version, digest)

    def stats(self) -> EngineStats:
        tally = self._tally
        return EngineStats(
            running=len(self._jobs) - len(self._waiting),
            waiting=len(self._waiting),
            version=self._version,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            reprefilled_tokens=self._reprefilled,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            drafts=tally.drafts,
            drafted_tokens=tally.drafted_tokens,
            accepted_by_position=tuple(tally.accepted),
            speculation=self._chooser.report(),
        )

    def _open(self) -> None:
        settings, drafter = self.settings, self._drafter
        rows, spare = settings.max_batch, spare_slots(drafter)
        length = settings.max_length + spare
        policy = Policy(self._model_path, self._dtype, length, keep_output=isinstance(drafter, EagleDrafter))
        cache = KvCache(policy.config, rows, length, self._dtype)
        if isinstance(drafter, NoDrafter):
            drafts = source = self._head = None
        else:
            drafts, source = DraftTable(rows, spare), build_source(drafter, policy, settings)
            self._head = source if isinstance(source, HeadSource) else None
        slots = SlotTable(rows, settings.max_length, drafts)
        caches = [cache] if self._head is None else [cache, self._head.cache]
        self._decoding = Decoding(policy, cache, slots)
        self._scheduler = Scheduler(slots, caches, self._waiting, rows, settings.prefill_chunk)
        self._speculator = None
        if drafts is not None and source is not None:
            self._speculator = Speculator(self._decoding, self._scheduler, drafts, source, self._chooser, self._tally)

    def _shut(self) -> None:
        del self._decoding, self._scheduler, self._speculator, self._head

    def _check(self, request: Request) -> None:
        if len(request.tokens) >= self.settings.max_length:
            raise EngineError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room for an answer within "
                f"engine.max_length={self.settings.max_length}; shorten the prompt or raise engine.max_length"
            )
        vocabulary = self._decoding.policy.config.vocabulary
        if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
            raise EngineError(f"request {request.id}: token ids must be in 0..{vocabulary - 1}, the model's vocabulary")

    def _step(self) -> None:
        with torch.inference_mode():  # as a decorator it would cost more than sampling
            if self._speculator is None:
                outcome = self._decoding.plain(self._scheduler.plan())
            else:
                outcome = self._speculator.step()
        if isnan(outcome.logprob_sum):
            raise EngineError(f"the model's logits are NaN under version {self._version}: its weights have diverged")
        self._generated += outcome.sampled
        self._prefilled += outcome.prefilled
        rows, stopped = outcome.ended
        jobs = [self._decoding.slots.jobs[row] for row in rows]  # first all of them: finishing one moves another's row
        for job, by_stop in zip(jobs, stopped, strict=True):
            self._finish(job, "stop" if by_stop else "length")

    def _take_row(self, job: Job) -> Segment:
        slots, row = self._decoding.slots, job.row
        span = slice(slots.segment[row], slots.known[row])
        slots.segment[row] = slots.known[row]
        return Segment.sampled(slots.tokens[row, span], slots.logprobs[row, span], self._version)

    def _release(self, job: Job) -> None:
        self._scheduler.release(job)
