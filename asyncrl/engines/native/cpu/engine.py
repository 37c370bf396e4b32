"""Our own torch engine: continuous batching with one flat forward per step.

submit -> waiting -> Scheduler.plan -> Decoder over KvCache.attend -> sample -> BatchTable.record -> deltas

With a drafter, a step verifies drafts and makes the next ones (asyncrl.engines.native.cpu.speculator).
On a GPU, `asyncrl.engines.native.cuda.engine` takes its place.
"""

from pathlib import Path

import torch

from asyncrl.config.drafter import DrafterSettings, NoDrafter
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Numerics
from asyncrl.drafting.hidden_capture import RolloutTap
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cpu.cache import KvCache
from asyncrl.engines.native.cpu.decoding import Decoding, Policy
from asyncrl.engines.native.cpu.draft_heads import HeadSource, build_source
from asyncrl.engines.native.cpu.fp8 import Fp8KvCache, Fp8Policy
from asyncrl.engines.native.cpu.routes import HostRoutes
from asyncrl.engines.native.cpu.scheduler import Scheduler
from asyncrl.engines.native.cpu.speculator import Speculator
from asyncrl.engines.native.rows import SpeculatingEngine
from asyncrl.engines.native.speculation.source import Chooser, no_head, spare_slots
from asyncrl.engines.native.verification import DraftTable
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import EngineError
from asyncrl.models.routes import RouteShape
from asyncrl.types import WeightAck, WeightManifest


class NativeEngine(SpeculatingEngine):
    def __init__(
        self,
        model_path: Path,
        settings: Settings,
        drafter: DrafterSettings | None = None,
        *,
        name: str,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        numerics: Numerics | None = None,
        chooser: Chooser | None = None,
        tap: RolloutTap | None = None,
        routes: bool = False,
    ) -> None:
        """`tap` gets hidden states of the answers that it names; `routes`: return them, if the model has experts."""
        super().__init__(settings, drafter or NoDrafter(), name=name, version=version, chooser=chooser)
        self._model_path, self._dtype, self._numerics = model_path, dtype, numerics
        self._drafter_version = 0
        self._tap, self._returns_routes = tap, routes

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        digest = self._decoding.policy.load(manifest, Receiver(self.name, f"version {self._version}", "model"))
        self._switch_version(manifest.version)
        if self._tap is not None:
            self._tap.begin_step(manifest.version)
        self._scheduler.forget_prompts()
        again = self._scheduler.recompute() if on_update == "recompute" else 0
        self._reprefilled += again
        return WeightAck(self.name, manifest.version, digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        self._require_serving(f"a drafter of version {manifest.version}")
        if self._head is None:
            raise EngineError(no_head(self.name, self._drafter))
        digest = self._head.load(manifest, Receiver(self.name, f"drafter {self._drafter_version}", "drafting head"))
        self._drafter_version = manifest.version
        return WeightAck(self.name, manifest.version, digest)

    def _open(self) -> None:
        settings, drafter, head = self.settings, self._drafter, self._drafter.head
        rows, spare = settings.max_batch, spare_slots(drafter)
        length = settings.max_length + spare
        policy, cache = self._make_policy(rows, length, keep_output=head is not None and head.uses_target_output)
        if drafter.drafting is None:
            drafts = source = self._head = None
        else:
            drafts, source = DraftTable(rows, spare), build_source(drafter.drafting, policy, settings)
            self._head = source if isinstance(source, HeadSource) else None
        shape = RouteShape.of(policy.config) if self._returns_routes else None
        routes = None if shape is None else HostRoutes(shape, rows, length + 2)
        slots = BatchTable(rows, settings.max_length, drafts, routes)
        self._serve_model(policy.config.vocabulary, slots)
        caches = [cache] if self._head is None else [cache, self._head.cache]
        self._decoding = Decoding(policy, cache, slots, self._tap, routes)
        # A head has a cache of its own, with gaps, and hidden states are wanted of every token.
        reuse = self._head is None and self._tap is None
        self._scheduler = Scheduler(slots, caches, self._waiting, rows, settings.prefill_chunk, reuse=reuse)
        self._speculator = None
        if drafts is not None and source is not None:
            self._speculator = Speculator(self._decoding, self._scheduler, drafts, source, self._chooser, self._tally)

    def _make_policy(self, rows: int, length: int, *, keep_output: bool) -> tuple[Policy, KvCache]:
        if self._numerics is None:
            policy = Policy(self._model_path, self._dtype, length, keep_output=keep_output)
            return policy, KvCache(policy.config, rows, length, self._dtype)
        policy = Fp8Policy(self._model_path, self._dtype, length, self._numerics, keep_output=keep_output)
        return policy, Fp8KvCache(policy, rows, length, self._dtype)

    def _shut(self) -> None:
        del self._decoding, self._scheduler, self._speculator, self._head, self._slots

    def _step(self) -> None:
        with torch.inference_mode():  # as a decorator it would cost more than sampling
            if self._speculator is None:
                outcome = self._decoding.plain(self._scheduler.plan())
            else:
                outcome = self._speculator.step()
        self._cached = self._scheduler.cached
        self._record(outcome.sampled, outcome.prefilled, outcome.ended, outcome.logprob_sum)

    def _release(self, job: Job) -> None:
        self._scheduler.release(job)
