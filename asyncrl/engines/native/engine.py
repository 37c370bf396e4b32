"""Our own torch engine: continuous batching with one flat forward per step.

submit -> waiting -> Scheduler.plan -> Decoder over KvCache.attend -> sample -> SlotTable.record -> deltas
"""

from math import isnan
from pathlib import Path

import torch

from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import CooperativeEngine, Job
from asyncrl.engines.native.cache import KvCache
from asyncrl.engines.native.layout import decoding_tensors, store_by_columns
from asyncrl.engines.native.sampling import sample
from asyncrl.engines.native.scheduler import Scheduler, Step
from asyncrl.engines.native.slots import SlotTable
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.head import fp32_product
from asyncrl.models.names import hf_tensors
from asyncrl.types import EngineStats, Request, Segment, WeightAck, WeightManifest
from asyncrl.weights.shared_memory import digest_tensors, read_tensors


class NativeEngine(CooperativeEngine):
    def __init__(
        self, model_path: Path, settings: Settings, *, name: str, version: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(name, version)
        self.settings = settings
        self._model_path, self._dtype = model_path, dtype
        self._generated = self._prefilled = self._reprefilled = 0

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        digest = self._load(manifest)
        self._derive()
        self._switch_version(manifest.version)
        self._scheduler.forget_prompts()
        again = self._scheduler.recompute() if on_update == "recompute" else 0
        self._reprefilled += again
        return WeightAck(self.name, manifest.version, digest, again)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._jobs) - len(self._waiting),
            waiting=len(self._waiting),
            version=self._version,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            reprefilled_tokens=self._reprefilled,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
        )

    def _open(self) -> None:
        rows, length = self.settings.max_batch, self.settings.max_length
        self._model, config = load_model(self._model_path, self._dtype)
        store_by_columns(self._model)
        self._derive()
        self._cache = KvCache(config, rows, length, self._dtype)
        self._slots = SlotTable(rows, length)
        self._scheduler = Scheduler(self._slots, self._cache, self._waiting, rows, self.settings.prefill_chunk)

    def _derive(self) -> None:
        """What follows from the weights and must be made again when they change."""
        self._tensors, self._head_E_V = decoding_tensors(self._model, self.settings.max_length)

    def _shut(self) -> None:
        del self._model, self._tensors, self._head_E_V, self._cache, self._slots, self._scheduler

    def _check(self, request: Request) -> None:
        if len(request.tokens) >= self.settings.max_length:
            raise EngineError(
                f"request {request.id}: {len(request.tokens)} tokens leave no room for an answer within "
                f"engine.max_length={self.settings.max_length}; shorten the prompt or raise engine.max_length"
            )
        vocabulary = self._model.config.vocabulary
        if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
            raise EngineError(f"request {request.id}: token ids must be in 0..{vocabulary - 1}, the model's vocabulary")

    def _step(self) -> None:
        with torch.inference_mode():  # as a decorator it would cost more than sampling
            step, token_N_1, logprob_N_1 = self._decode()
        slots, logprob_N = self._slots, logprob_N_1.numpy()[:, 0]
        if isnan(logprob_N.sum()):
            raise EngineError(f"the model's logits are NaN under version {self._version}: its weights have diverged")
        sampled, ended = slots.record(step.end_N, token_N_1.numpy()[:, 0], logprob_N)
        self._generated += sampled
        self._prefilled += len(step.tokens_T) - sampled
        jobs = [slots.jobs[row] for row in ended.rows]  # first all of them: finishing one moves another's row
        for job, stopped in zip(jobs, ended.stopped, strict=True):
            self._finish(job, "stop" if stopped else "length")

    def _decode(self) -> tuple[Step, torch.Tensor, torch.Tensor]:
        step, slots = self._scheduler.plan(), self._slots
        rows = slots.count
        attend = self._cache.attend(step.positions_T, rows, step.reach, step.chunks)
        hidden_N_E = self._tensors.forward(torch.from_numpy(step.tokens_T), torch.from_numpy(step.positions_T), attend)
        logits_N_V = fp32_product(hidden_N_E, self._head_E_V)
        uniform_N_1 = torch.from_numpy(slots.uniforms[slots.index[:rows], step.end_N, None])
        return step, *sample(logits_N_V, slots.settings(), uniform_N_1)

    def _take_row(self, job: Job) -> Segment:
        slots, row = self._slots, job.row
        span = slice(slots.segment[row], slots.known[row])
        slots.segment[row] = slots.known[row]
        return Segment.sampled(slots.tokens[row, span], slots.logprobs[row, span], self._version)

    def _release(self, job: Job) -> None:
        self._scheduler.release(job)

    @torch.no_grad()
    def _load(self, manifest: WeightManifest) -> str:
        """Copy the published tensors in; the old ones come back unless the digest of what we hold agrees."""
        held = dict(hf_tensors(self._model))
        self._check_fit(manifest, held)
        old = {name: tensor.clone() for name, tensor in held.items()}
        for name, tensor in read_tensors(manifest):
            held[name].copy_(tensor)
        digest = digest_tensors((spec.name, held[spec.name]) for spec in manifest.tensors)
        if digest != manifest.digest:
            for name, tensor in old.items():
                held[name].copy_(tensor)
            raise WeightSyncError(
                f"engine {self.name}: weights of version {manifest.version} have digest {digest}, published was "
                f"{manifest.digest}; version {self._version} is kept, publish again"
            )
        return digest

    def _check_fit(self, manifest: WeightManifest, held: dict[str, torch.Tensor]) -> None:
        published = {(spec.name, spec.shape) for spec in manifest.tensors}
        differing = published ^ {(name, tuple(tensor.shape)) for name, tensor in held.items()}
        if differing:
            names = ", ".join(f"{name} {shape}" for name, shape in sorted(differing)[:5])
            raise WeightSyncError(
                f"engine {self.name}: version {manifest.version} belongs to another model, differing in {names}; "
                f"publish the model that the engine was started with"
            )
