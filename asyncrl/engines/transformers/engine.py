"""Decodes with the forward of a transformers model and transformers' own caches: what `generate` would compute.

submit -> waiting -> cohorts -> Policy.logits -> sample -> BatchTable.keep -> deltas

Rows share a forward only where that is exact for every kind of layer: no padding, so all have the same length. Samples
of one prompt that begin together do, to their end. They are a cohort, with one cache. The prompt is computed once, and
each step computes one token of every row of one cohort.

Axis suffixes: N rows of a cohort, U those of them that differ, L tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from asyncrl.config.engine import TransformersEngine as Settings
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.rows import RowEngine
from asyncrl.engines.native.sampling import Column, Purpose, RowSettings, sample
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.engines.transformers.policy import Policy
from asyncrl.errors import EngineError
from asyncrl.models.outline import read_outline
from asyncrl.types import WeightAck, WeightManifest


class Cohort:
    """Rows of the same length and their cache."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        """In the order of the cache; those without a row have ended."""
        self.cache: Cache | None = None
        """None: nothing is computed yet."""

    def drop_ended(self) -> None:
        alive = [index for index, job in enumerate(self.jobs) if job.row >= 0]
        if len(alive) == len(self.jobs):
            return
        self.jobs = [self.jobs[index] for index in alive]
        if self.cache is not None and alive:
            _select(self.cache, alive)

    def unlike(self, tokens_N_L: Tensor) -> Tensor:
        """The rows that have to be computed: of a prompt that all have, one."""
        shared = self.cache is None and bool((tokens_N_L == tokens_N_L[0]).all())
        return tokens_N_L[:1] if shared else tokens_N_L

    def logits(self, policy: Policy, tokens_U_L: Tensor) -> Tensor:
        """Of every row, after these tokens, which follow what is in the cache."""
        if self.cache is None:
            self.cache = policy.cache()
        logits_U_V, rows = policy.logits(tokens_U_L, self.cache), len(self.jobs)
        if len(tokens_U_L) < rows:
            _select(self.cache, [0] * rows)
            return logits_U_V.expand(rows, -1)
        return logits_U_V


def _select(cache: Cache, rows: list[int]) -> None:
    """Keep these rows, any of them several times. Caches of every kind of layer can do this, for beam search."""
    cache.reorder_cache(cast(torch.LongTensor, torch.tensor(rows)))


def _alike(waiting: Iterable[Job], most: int) -> list[Job]:
    """Those in front that have the prompt of the first."""
    jobs = [*islice(waiting, most)]
    return [*takewhile(lambda job: job.request.tokens == jobs[0].request.tokens, jobs)]


class TransformersEngine(RowEngine):
    def __init__(
        self,
        model_path: Path,
        settings: Settings,
        *,
        name: str,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        positions = read_outline(model_path).positions
        length = settings.max_length if positions is None else min(settings.max_length, positions)
        super().__init__(length, name=name, version=version)
        self._settings = msgspec.structs.replace(settings, max_length=length)
        self._model_path, self._dtype = model_path, dtype
        self._device = device or torch.device("cpu")
        self._cohorts: deque[Cohort] = deque()

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        digest = self._policy.load(manifest, Receiver(self.name, f"version {self._version}", "model"))
        self._switch_version(manifest.version)
        again = self._recompute() if on_update == "recompute" else 0
        self._reprefilled += again
        return WeightAck(self.name, manifest.version, digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        self._require_serving(f"a drafter of version {manifest.version}")
        raise EngineError(f"engine {self.name} decodes without drafts; use engine=native or vllm")

    def _open(self) -> None:
        self._policy = Policy(self._model_path, self._dtype, self._device, self._max_length)
        self._serve_model(self._policy.vocabulary, BatchTable(self._settings.max_batch, self._max_length))

    def _shut(self) -> None:
        self._cohorts.clear()
        del self._policy, self._slots

    def _step(self) -> None:
        self._admit()
        with torch.inference_mode():
            cohort = self._next_cohort()
            rows_N = np.array([job.row for job in cohort.jobs])
            begin, end_N = int(self._slots.computed[rows_N[0]]), self._slots.known[rows_N]
            tokens_U_L = cohort.unlike(torch.from_numpy(self._slots.tokens[rows_N, begin : end_N[0]]))
            logits_N_V = cohort.logits(self._policy, tokens_U_L)
            token_N_1, logprob_N_1 = sample(logits_N_V, self._sampling(rows_N), self._uniforms(rows_N))
            token_N, logprob_N = (column.cpu().numpy()[:, 0] for column in (token_N_1, logprob_N_1))
        self._slots.computed[rows_N] = end_N
        sampled, ended = self._slots.keep(rows_N, end_N, token_N, logprob_N)
        self._record(sampled, tokens_U_L.numel() - len(tokens_U_L), ended, float(logprob_N.sum()))

    def _admit(self) -> None:
        """Samples of one prompt begin together, or wait until there is room for all: only so do they share forwards."""
        while self._waiting:
            alike = _alike(self._waiting, self._settings.max_batch)
            if len(alike) > self._settings.max_batch - self._slots.count:
                return
            for job in alike:
                self._waiting.popleft()
                self._slots.append(job)
            self._cohorts.appendleft(Cohort(alike))

    def _next_cohort(self) -> Cohort:
        """In turns; a new one first."""
        while True:
            cohort = self._cohorts.popleft()
            cohort.drop_ended()
            if cohort.jobs:
                self._cohorts.append(cohort)
                return cohort

    def _sampling(self, rows_N: Column) -> RowSettings:
        settings = self._slots.settings()
        return RowSettings(*(None if each is None else each[rows_N].to(self._device) for each in settings))

    def _uniforms(self, rows_N: Column) -> Tensor:
        ends = self._slots.known[: self._slots.count, None]
        return torch.from_numpy(self._slots.uniforms_of(Purpose.PLAIN, ends)[rows_N]).to(self._device)

    def _recompute(self) -> int:
        """Let every row be computed again; returns how many tokens that is."""
        computed_N = self._slots.computed[: self._slots.count]
        again = int(computed_N.sum())
        computed_N[:] = 0
        cohorts, self._cohorts = self._cohorts, deque()
        for cohort in cohorts:
            jobs = [job for job in cohort.jobs if job.row >= 0]
            size = max(1, self._settings.prefill_chunk // int(self._slots.known[jobs[0].row])) if jobs else 1
            self._cohorts.extend(Cohort(jobs[begin : begin + size]) for begin in range(0, len(jobs), size))
        return again

    def _release(self, job: Job) -> None:
        row, job.row = job.row, -1
        self._slots.remove_last_into(row)
