"""vLLM's AsyncLLM as one of our engines: token ids in, deltas with log-probabilities and versions out.

vLLM runs its model in a process of its own. Nothing of it is patched: requests go to that process and steps come back
(requests.py), it is paused and resumed, weights go through its update phases with a transfer backend of our own
(worker.py), a scheduler of ours packs what comes back (scheduler.py), and prefix cache salts keep versions apart.
"""

import asyncio
import gc
import os
import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import msgspec
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import VllmEngine as Settings
from asyncrl.config.precision import Fp8
from asyncrl.drafting.bandit import Range, Report, Speculation
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.vllm.environment import SPECULATION
from asyncrl.engines.vllm.options import adaptive_drafter, engine_args, within
from asyncrl.engines.vllm.requests import VllmRequests
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.config import read_config
from asyncrl.models.routes import RouteShape
from asyncrl.precision.kv_scales import LayerScales, settled
from asyncrl.types import EngineStats, WeightAck, WeightManifest

QUIET_TURNS = 10
"""Turns of the event loop without a new token after which, in a paused engine, none is on its way any more."""
END_TIMEOUT_S = 10.0
"""For vLLM's processes to end after its shutdown."""
ORDER_TIMEOUT_S = 60.0
"""For an order to reach vLLM's scheduler, which looks for one while it has requests."""


class VllmEngine(VllmRequests):
    def __init__(
        self,
        model_path: Path,
        settings: Settings,
        drafter: DrafterSettings,
        *,
        name: str,
        version: int = 0,
        precision: str = "fp32",
        fp8: Fp8 | None = None,
        learned: Sequence[Range] = (),
        adapted: Sequence[str] = (),
        routes: bool = False,
    ) -> None:
        shape = RouteShape.of(read_config(model_path)) if routes else None
        super().__init__(within(settings, model_path), name, version, shape)
        self._args = engine_args(model_path, self._settings, drafter, precision, fp8, adapted, routes=shape is not None)
        self._speculation: Speculation | None = None
        if (adaptive := adaptive_drafter(drafter)) is not None:
            folder = tempfile.mkdtemp(prefix="asyncrl-speculation-")
            self._speculation = Speculation(drafter=adaptive, folder=folder)
            self._speculation.write("report", Report(learned=learned))
        self._processes: list[BaseProcess] = []
        self._updating = asyncio.Lock()
        self._paused = False
        self._reprefilled = 0
        self._kv_scales: tuple[LayerScales, ...] = ()
        """In use; without any vLLM has 1 for all."""

    async def start(self) -> None:
        if self._llm is not None:
            raise EngineError(f"engine {self.name} was started before; make a new one")
        if self._speculation is not None:
            os.environ[SPECULATION] = msgspec.json.encode(self._speculation).decode()
        others = active_children()
        # It blocks this loop on purpose: nothing can be served before, and vLLM has its own limit for the start.
        try:
            self._llm = AsyncLLM.from_engine_args(self._args)
        except Exception as error:
            raise EngineError(
                f"engine {self.name} did not start: {error}; vLLM printed the cause above, and prints more with "
                "--verbose"
            ) from error
        self._processes = [process for process in active_children() if process not in others]
        handler, self._llm.output_handler = self._llm.output_handler, None
        if handler is not None:
            handler.cancel()  # there is one reader, and that is ours
        self._reader = asyncio.create_task(self._read())
        await self._llm.collective_rpc("prepare_updates")
        enable_envs_cache()  # else vLLM looks one up for each token
        gc.freeze()  # vLLM's modules stay; a full collection over them would stop every stream for 0.3 to 0.5 s
        self._refusal = ""

    async def pause(self) -> None:
        self._paused = True
        await self._halt()

    async def resume(self) -> None:
        self._paused = False
        await self._serving().resume_generation()

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        return await self._update(manifest, "policy", on_update)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        """New weights for the drafting head; the policy and its version stay."""
        return await self._update(manifest, "drafter", "keep")

    async def _update(self, manifest: WeightManifest, target: Literal["policy", "drafter"], on: OnUpdate) -> WeightAck:
        self._require_serving(f"weights of version {manifest.version}")
        async with self._updating:
            manifest, before = self._with_settled_scales(manifest), self._kv_scales
            encoded = msgspec.json.encode(manifest).decode()
            await self._verify(manifest, encoded)
            again = 0
            try:
                await self._halt()
                await (self._load_head(encoded, manifest.version) if target == "drafter" else self._load(encoded))
                if target == "policy":
                    self._switch_version(manifest.version)
                    self._kv_scales = manifest.fp8.kv_scales if manifest.fp8 else ()
                    moved = _cached(before) != _cached(self._kv_scales)
                    again = await self._forget_keys() if on == "recompute" or moved else 0
            finally:
                if not self._paused and not self._refusal:
                    await self._serving().resume_generation()
        return WeightAck(self.name, manifest.version, manifest.digest, again)

    def _with_settled_scales(self, manifest: WeightManifest) -> WeightManifest:
        """What is cached under other scales cannot be read any more, so these change as seldom as they can."""
        if manifest.fp8 is None:
            return manifest
        used, needed = self._kv_scales, manifest.fp8.kv_scales
        scales = settled(used or ((1.0, 1.0, 1.0),) * len(needed), needed) if needed else used
        return msgspec.structs.replace(manifest, fp8=msgspec.structs.replace(manifest.fp8, kv_scales=scales))

    async def _verify(self, manifest: WeightManifest, encoded: str) -> None:
        """Nothing is touched unless every worker reads exactly what was published."""
        try:
            digests = await self._serving().collective_rpc("check_published", args=(encoded,))
        except Exception as error:  # whatever kept a worker from reading, the model is as it was
            raise WeightSyncError(
                f"engine {self.name}: weights of version {manifest.version} cannot be loaded: {error}; version "
                f"{self._version} is kept, publish again"
            ) from error
        for digest in digests:
            if digest != manifest.digest:
                raise WeightSyncError(
                    f"engine {self.name}: weights of version {manifest.version} have digest {digest}, published was "
                    f"{manifest.digest}; version {self._version} is kept, publish again"
                )

    async def _halt(self) -> None:
        """Stop decoding, and wait until the tokens sampled so far have arrived, which all are of this version.

        vLLM answers the pause on the connection that carries its tokens, behind the last of them. From then on they
        only pass through tasks of this loop, each of which moves on in every turn while it has something to do.
        """
        await self._serving().pause_generation(mode="keep", clear_cache=False)
        quiet = 0
        while quiet < QUIET_TURNS:
            before = self._generated, len(self._jobs)
            await asyncio.sleep(0)
            quiet = quiet + 1 if before == (self._generated, len(self._jobs)) else 0

    async def _load(self, encoded: str) -> None:
        try:
            await self._serving().start_weight_update()
            await self._finish_loading(encoded)
        except Exception as error:  # whatever a worker raised, some layers may be new and others old
            self._fail(f"holds half-loaded weights: {error!r}", error)
            raise WeightSyncError(f"engine {self.name} {self._refusal}; start it again") from error

    async def _load_head(self, encoded: str, version: int) -> None:
        """Some layers of a head may be new and others old: whatever it drafts is verified."""
        try:
            await self._serving().start_draft_weight_update()
            await self._finish_loading(encoded)
        except Exception as error:  # whatever a worker raised
            raise WeightSyncError(
                f"engine {self.name}: head {version} was not loaded: {error!r}; it goes on with the one that it has"
            ) from error

    async def _finish_loading(self, encoded: str) -> None:
        await self._serving().update_weights(WeightTransferUpdateRequest(update_info={"manifest": encoded}))
        await self._serving().finish_weight_update()

    async def _forget_keys(self) -> int:
        """Preempt what runs: vLLM computes its keys and values again, under the new weights."""
        again = sum(len(job.request.tokens) + job.sampled for job in self._jobs.values() if job.sampled)
        self._reprefilled += again
        await self._serving().reset_prefix_cache(reset_running_requests=True)
        return again

    def stats(self) -> EngineStats:
        waiting = sum(not job.sampled for job in self._jobs.values())
        return EngineStats(
            running=len(self._jobs) - waiting,
            waiting=waiting,
            version=self._version,
            generated_tokens=self._generated,
            prefilled_tokens=self._counters.prefilled,
            cached_tokens=self._counters.cached,
            kv_tokens=self._kv_tokens(),
            reprefilled_tokens=self._reprefilled,
            steps=self._counters.steps,
            busy_seconds=0.0,
            preempted=self._counters.preempted,
            drafts=self._counters.drafts,
            drafted_tokens=self._counters.drafted,
            accepted_by_position=tuple(self._counters.accepted),
            speculation=self._speculation.report().arms if self._speculation else (),
        )

    def _kv_tokens(self) -> int:
        if self._llm is None:
            return 0
        cache = self._llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size

    def learned(self) -> list[Range]:
        return list(self._speculation.report().learned) if self._speculation else []

    async def force_depth(self, depth: int | None) -> None:
        """Draft so many tokens in every step; None: the bandit chooses again. Waits for the next steps to do so."""
        if self._speculation is None:
            raise EngineError(f"engine {self.name} has no bandit: drafter.adaptive.on must be true, and by_batch empty")
        self._speculation.order(depth)
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            while self._speculation.report().depth != depth:  # noqa: ASYNC110  (another process says so in a file)
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._refusal = "is closed"
        if self._speculation is not None:
            shutil.rmtree(self._speculation.folder, ignore_errors=True)
        llm = self._llm
        if llm is None:
            return
        for job in list(self._jobs.values()):
            self._finish(job, "abort")
        self._llm = None
        self._reader.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        await asyncio.to_thread(llm.shutdown)
        for process in self._processes:  # vLLM ends them, but leaves them as zombies until somebody looks
            await asyncio.to_thread(process.join, END_TIMEOUT_S)
        gc.unfreeze()
        disable_envs_cache()


def _cached(scales: Sequence[LayerScales]) -> list[tuple[float, float]]:
    """Of keys and values; no query is kept."""
    return [(keys, values) for _, keys, values in scales]
