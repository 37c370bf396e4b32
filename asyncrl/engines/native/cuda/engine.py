"""The native engine on a GPU: paged keys and values, captured graphs, and a host that is one step behind.

submit -> waiting -> Planner -> Decoding.step (device) -> [one step later] SlotTable.keep -> deltas

`_step` launches the next step before it waits for the last: planning, recording and the turns of the event loop are
hidden behind the device's work. Before weights change, and before a pause returns, the running step is read, so each
token has the version that sampled it and a paused engine has nothing under way.
"""

import asyncio
import gc
import logging
from pathlib import Path

import torch

from asyncrl.drafting.settings import DrafterSettings, NoDrafter
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.cuda import weights
from asyncrl.engines.native.cuda.decoding import Decoding, Flight
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.inputs import Sizes
from asyncrl.engines.native.cuda.kernels import torch_kernels
from asyncrl.engines.native.cuda.kernels.shapes import Kernels
from asyncrl.engines.native.cuda.model import CudaModel
from asyncrl.engines.native.cuda.pages import PAGE, PageTable, pages_of
from asyncrl.engines.native.cuda.planner import Planner
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.published import Receiver
from asyncrl.engines.native.rows import RowEngine
from asyncrl.engines.native.sampling import Column, RowSettings
from asyncrl.engines.native.slots import SlotTable
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.types import WeightAck, WeightManifest

log = logging.getLogger(__name__)
_TILE_QUERIES = 64
"""Rows of the matrix product of a tile: tokens times query heads that share a key."""


class CudaEngine(RowEngine):
    def __init__(
        self,
        model_path: Path,
        settings: Settings,
        drafter: DrafterSettings | None = None,
        *,
        name: str,
        version: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        kernels: Kernels | None = None,
        pages: int | None = None,
    ) -> None:
        """`pages` of keys and values; None: as many as `settings.memory` leaves room for."""
        super().__init__(settings, drafter or NoDrafter(), name=name, version=version)
        self._model_path, self._dtype, self._pages = model_path, dtype, pages
        self._device = device or torch.device("cuda")
        self._kernels = kernels or _kernels(self._device)
        self._updating = asyncio.Lock()
        self._flight: Flight | None = None
        self._settings_on_device: tuple[RowSettings, RowSettings | None] | None = None

    async def pause(self) -> None:
        await super().pause()
        self._drain()

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        what = f"weights of version {manifest.version}"
        async with self._updating:
            self._require_serving(what)
            receiver = Receiver(self.name, f"version {self._version}", "model")
            # In a thread, and so on another stream: decoding goes on while the published bytes are checked.
            digest = await asyncio.to_thread(weights.verify, manifest, self._held, receiver)
            self._require_serving(what)
            self._drain()
            with self._timeline.work():
                weights.load(manifest, self._held, self._device)
            self._timeline.wait()  # the trainer may write there again once we have answered
            self._switch_version(manifest.version)
            self._planner.forget_prompts()
            again = self._planner.recompute() if on_update == "recompute" else 0
            self._reprefilled += again
        return WeightAck(self.name, manifest.version, digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        raise EngineError(f"engine {self.name} has no drafting head on device=cuda; use engine.device=cpu for drafters")

    def _open(self) -> None:
        settings, device = self.settings, self._device
        self._timeline = Timeline(device)
        model, config = load_model(self._model_path, self._dtype, device)
        self._held = dict(hf_tensors(model))
        pages = self._pages or weights.page_count(config, settings, self._dtype, device)
        tile = max(16, _TILE_QUERIES * config.kv_heads // config.heads)
        sizes = Sizes(
            settings.max_batch, 1, pages_of(settings.max_length), max(1, settings.prefill_chunk // tile), tile
        )
        graphs = GraphPool(self._timeline, int(settings.graph_memory_gib * 2**30))
        with self._timeline.work():
            cuda_model = CudaModel(model, settings.max_length, self._kernels)
            memory = cuda_model.new_pages(pages, PAGE)
            self._decoding = Decoding(cuda_model, memory, sizes, self._timeline, graphs)
            if device.type == "cuda":
                self._decoding.capture_all()
        self._timeline.wait()
        log.info("engine %s: %d pages, %d graphs in %.2f GiB", self.name, pages, graphs.count, graphs.bytes / 2**30)
        self._serve_model(config.vocabulary, SlotTable(settings.max_batch, settings.max_length))
        table = PageTable(settings.max_batch, settings.max_length, pages)
        copy = self._decoding.copy_page
        self._planner = Planner(self._slots, table, self._waiting, copy, tiles=sizes.tiles, tile=tile)

    def _shut(self) -> None:
        self._timeline.wait()
        del self._decoding, self._planner, self._slots, self._held
        self._flight = None
        gc.collect()  # captured graphs lie in cycles, and hold memory that others on the card wait for
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _step(self) -> None:
        last, running = self._flight, self._planner.running()
        with self._timeline.work():
            self._planner.admit()
            rows_R, place_R = running
            self._flight = self._launch()
        if last is not None:
            self._collect(last, rows_R, place_R)

    def _drain(self) -> None:
        """Read the running step."""
        last, self._flight = self._flight, None
        if last is not None:
            running = self._planner.running()
            self._planner.source[:] = -1
            self._collect(last, *running)

    def _launch(self) -> Flight | None:
        slots, planner, fields = self._slots, self._planner, self._decoding.inputs.next()
        planner.make_room()
        tiles = planner.prefill(fields)
        shape = self._decoding.shape(slots.count, tiles)
        fields.tile_count_J[tiles : shape.tiles] = 0
        sampling = planner.decode(fields, shape.rows)
        if not sampling and not tiles:
            return None
        self._prefilled += int(fields.tile_count_J[:tiles].sum())
        return self._decoding.step(shape, slots.count, self._restricted())

    def _collect(self, flight: Flight, rows_R: Column, place_R: Column) -> None:
        flight.mark.wait()
        if not len(rows_R):
            return
        slots = self._slots
        logprob_R = flight.logprob_N[place_R]
        sampled, ended = slots.keep(rows_R, slots.known[rows_R], flight.token_N[place_R], logprob_R)
        self._record(sampled, 0, ended, float(logprob_R.sum()))

    def _restricted(self) -> RowSettings | None:
        """Settings on the device where a row needs more than its temperature."""
        settings = self._slots.settings()
        known = self._settings_on_device
        if known is None or known[0] is not settings:
            on_device = None
            if settings.top_k_N_1 is not None:
                on_device = RowSettings(*(None if each is None else each.to(self._device) for each in settings))
            known = self._settings_on_device = settings, on_device
        return known[1]

    def _release(self, job: Job) -> None:
        self._planner.release(job)


def _kernels(device: torch.device) -> Kernels:
    if device.type == "cpu":
        return torch_kernels.KERNELS
    from asyncrl.engines.native.cuda.kernels import triton_kernels  # Triton comes with torch for GPUs only

    return triton_kernels.KERNELS
