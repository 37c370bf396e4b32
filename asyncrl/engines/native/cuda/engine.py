"""The native engine on a GPU: paged keys and values, captured graphs, and a host that is one step behind.

submit -> waiting -> Planner -> Decoding.step (device) -> [one step later] BatchTable.keep -> deltas

`_step` launches the next step before it waits for the last: planning, recording and the turns of the event loop are
hidden behind the device's work. New weights are copied before the next step, which is planned meanwhile: those of the
first layers once the running step has passed them, the others behind it. Their version counts as soon as that step has
been read, so each token has the version that sampled it. A paused engine has nothing under way.
A step that verifies or makes drafts is read at once, behind the drafting of the next ones (`cuda.speculation`).
"""

import asyncio
import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncrl.config.drafter import PLAIN, DrafterSettings, NoDrafter, Strategy
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Numerics
from asyncrl.drafting.hidden_capture import RolloutTap
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.cooperative import Job, turns
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda import weights
from asyncrl.engines.native.cuda.adapters import Base
from asyncrl.engines.native.cuda.decoding import Decoding
from asyncrl.engines.native.cuda.device_outputs import DeviceOutputs, Flight
from asyncrl.engines.native.cuda.drafting import RING, Drafting
from asyncrl.engines.native.cuda.fp8 import agree, serve
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.hidden_capture import HiddenCapture, StatePool
from asyncrl.engines.native.cuda.inputs import Fields, Shape, Sizes, StepInputs
from asyncrl.engines.native.cuda.kernels.choice import kernels_of
from asyncrl.engines.native.cuda.kernels.shapes import Kernels
from asyncrl.engines.native.cuda.memory import KvMemory, page_bytes
from asyncrl.engines.native.cuda.pages import PAGE, PageTable, pages_of
from asyncrl.engines.native.cuda.planner import Planner
from asyncrl.engines.native.cuda.routes import RoutePages
from asyncrl.engines.native.cuda.speculation import Clock, Speculation, chain_depths
from asyncrl.engines.native.cuda.timeline import Mark, Timeline
from asyncrl.engines.native.rows import SpeculatingEngine
from asyncrl.engines.native.sampling import Column
from asyncrl.engines.native.speculation.source import Chooser, build_head, no_head
from asyncrl.engines.native.verification import DraftTable
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import EngineError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.models.routes import RouteShape
from asyncrl.types import WeightAck, WeightManifest

log = logging.getLogger(__name__)
_TILE_QUERIES = 64
"""Rows of the matrix product of a tile: tokens times query heads that share a key."""


class CudaEngine(SpeculatingEngine):
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
        numerics: Numerics | None = None,
        pages: int | None = None,
        chooser: Chooser | None = None,
        adapted: Sequence[str] = (),
        tap: RolloutTap | None = None,
        routes: bool = False,
    ) -> None:
        """`pages` of keys and values; None: as many as `settings.memory` leaves room for. `adapted`: projections of
        which adapters are published; their base is kept. `tap` gets hidden states of the completions that it names;
        `routes`: return them, if the model has experts."""
        super().__init__(settings, drafter or NoDrafter(), name=name, version=version, chooser=chooser)
        self._model_path, self._dtype, self._numerics, self._pages = model_path, dtype, numerics, pages
        self._adapted, self._tap, self._returns_routes = adapted, tap, routes
        self._device = device or torch.device("cuda")
        self._kernels = kernels or kernels_of(self._device)
        self._depths = chain_depths(self._drafter)
        self._widest = 1 + max(self._depths, default=0)
        self._updating = asyncio.Lock()
        self._flight: Flight | None = None
        self._due: int | None = None
        """The version of weights that the running step has not yet seen, but each further one does."""
        self._passed = False  # whether that step has been read
        self._drafter_version = 0
        self._clock, self._strategy = Clock(), PLAIN
        """The strategy is what has drafted for the next step."""

    async def pause(self) -> None:
        await super().pause()
        self._drain()

    async def load_weights(self, manifest: WeightManifest, on_update: OnUpdate) -> WeightAck:
        what = f"weights of version {manifest.version}"
        async with self._updating:
            self._require_serving(what)
            receiver = Receiver(self.name, f"version {self._version}", "model")
            digest, loaded = await self._load(manifest, self._intake, receiver, what)
            self._due, self._passed, again = manifest.version, self._flight is None, 0
            self._planner.forget_prompts()
            if on_update == "recompute":
                self._drain()
                again = self._planner.recompute()
                self._reprefilled += again
            await self._switched(what)
            await asyncio.to_thread(loaded.wait)  # the trainer may write there again once it has our answer
        return WeightAck(self.name, manifest.version, digest, again)

    async def load_drafter(self, manifest: WeightManifest) -> WeightAck:
        what = f"a drafter of version {manifest.version}"
        async with self._updating:
            self._require_serving(what)
            drafting = self._decoding.drafting
            if drafting is None or self._speculation is None:
                raise EngineError(no_head(self.name, self._drafter))
            receiver = Receiver(self.name, f"drafter {self._drafter_version}", "drafting head")
            with self._timeline.work():
                intake = weights.Intake(drafting.held(), self._timeline, self._kernels)
            digest, loaded = await self._load(manifest, intake, receiver, what)
            self._drain()  # what was on its way has still read the old weights
            with self._timeline.work():
                drafting.map_tokens(intake.held.get("d2t"))
            self._speculation.drop()
            self._drafter_version = manifest.version
            await asyncio.to_thread(loaded.wait)
        return WeightAck(self.name, manifest.version, digest)

    async def _load(
        self, manifest: WeightManifest, intake: weights.Intake, receiver: Receiver, what: str
    ) -> tuple[str, Mark]:
        """Published tensors into those held, behind the running step. Nobody need wait until it is done."""
        agree(intake.fp8, manifest, receiver)
        # In a thread, and so on another stream: decoding goes on while the published bytes are checked. In one call,
        # because to come back from a thread takes turns of the loop, and steps with them.
        digest, scales, update, probe = await asyncio.to_thread(intake.check, manifest, receiver)
        self._require_serving(what)
        with self._timeline.work():
            if probe is not None:
                probe(update.load)
            update.load()
            if scales:
                self._decoding.memory.rescale(scales)
            return digest, self._timeline.mark()

    async def _switched(self, what: str) -> None:
        """Until the version that is due counts. The next step sees to that, if there is one."""
        while self._due is not None:
            if self._flight is None or not self._work.is_set():
                self._drain()
            else:
                await turns()
                self._require_serving(what)
                self._switch()

    def _open(self) -> None:
        settings, device, timeline = self.settings, self._device, Timeline(self._device)
        model, config = load_model(self._model_path, self._dtype, device)
        drafter, drafting, numerics, self._timeline = self._drafter, None, self._numerics, timeline
        tile = self._tile = max(16, _TILE_QUERIES * config.kv_heads // config.heads)
        tiles, width = max(1, settings.prefill_chunk // tile), self._widest
        sizes = Sizes(settings.max_batch, width, pages_of(settings.max_length), tiles, tile)
        graphs = GraphPool(timeline, int(settings.graph_memory_gib * 2**30))
        with timeline.work():
            base = Base(hf_tensors(model), self._adapted)
            cuda_model, held, fp8 = serve(model, settings, self._kernels, numerics)
            inputs, board = StepInputs(sizes, timeline), DeviceOutputs(sizes, timeline)
            pool = None if self._tap is None else StatePool(self._tap, timeline)
            if drafter.head is not None:
                head = build_head(drafter.head, config).requires_grad_(False).to(device, self._dtype)
                drafting = Drafting(head, cuda_model, sizes, inputs, board, timeline)
            kind = {"fp8": numerics is not None and numerics.kv, "head": drafting is not None}
            routes = RouteShape.of(config) if self._returns_routes else None
            page = page_bytes(config, self._dtype, **kind, routes=routes)
            pages = self._pages or weights.page_count(config, settings, device, page, width)
            memory = KvMemory(cuda_model, pages, **kind, routes=routes)
            if fp8 is not None and kind["fp8"]:
                memory.rescale(fp8.own_scales())
            self._decoding = Decoding(cuda_model, memory, sizes, inputs, board, graphs, drafting, pool)
            if device.type == "cuda":
                self._decoding.capture_all(self._depths)
        timeline.wait()
        self._intake = weights.Intake(held, timeline, self._kernels, fp8, cuda_model.middle, base)
        self.kv_tokens = pages * PAGE
        known = self.name, self.kv_tokens, graphs.count, graphs.bytes / 2**30
        log.info("engine %s: room for the keys and values of %d tokens, %d graphs in %.2f GiB", *known)
        self._plan(config.vocabulary, pages, sizes)

    def _plan(self, vocabulary: int, pages: int, sizes: Sizes) -> None:
        """The host's side."""
        rows, length, decoding = sizes.rows, self.settings.max_length, self._decoding
        drafts = DraftTable(rows, sizes.width - 1) if self._depths else None
        table, written = PageTable(rows, length, pages), decoding.memory.routes_X_S_L_C
        routes = None if written is None else RoutePages(written, table, self._timeline)
        self._serve_model(vocabulary, BatchTable(rows, length, drafts, routes))
        self._capture = None
        if self._tap is not None and decoding.pool is not None:
            self._capture = HiddenCapture(self._tap, decoding.pool, self._slots, self._timeline, sizes.width)
        self._speculation = None
        if drafts is not None:
            self._speculation = Speculation(self._drafter, self._slots, drafts, self._tally)
        move = self._move_row if decoding.drafting is not None else None
        self._planner = Planner(
            self._slots,
            table,
            self._waiting,
            decoding.copy_pages,
            tiles=sizes.tiles,
            tile=sizes.tile,
            move=move,
            routes=routes,
            reuse=decoding.drafting is None,  # whose keys and values lie in the same pages, but have gaps
        )

    def _shut(self) -> None:
        self._timeline.wait()
        del self._decoding, self._planner, self._slots, self._intake, self._speculation, self._capture
        self._flight = self._due = None
        gc.collect()  # captured graphs lie in cycles, and hold memory that others on the card wait for
        torch.cuda.empty_cache()

    def _step(self) -> None:
        self._planner.admit()
        verified, self._strategy = self._strategy, self._chooser.choose(self._slots.count)
        if verified.depth or self._strategy.depth:
            self._speculate(verified, self._strategy.depth)
            return
        last, running = self._flight, self._planner.running()
        with self._timeline.work():
            if self._decoding.drafting is not None and self._planner.head_lag() >= RING:
                self._decoding.catch_up(self._slots, self._planner.table)
            self._flight = self._launch()
        if last is not None:
            self._collect(last, *running)

    def _drain(self) -> None:
        """Read the running step."""
        last, self._flight = self._flight, None
        if last is not None:
            running = self._planner.running()
            self._planner.source[:] = -1
            self._collect(last, *running)
        self._clock.stop()
        self._switch()

    def _switch(self) -> None:
        """Not right behind the tokens of the old version: to cut all answers takes time, and they would wait for it."""
        if self._due is not None and self._passed:
            version, self._due = self._due, None
            self._switch_version(version)
            if self._tap is not None:
                self._tap.begin_step(version)
            self._clock.stop()  # the next step waits for the copy

    def _launch(self) -> Flight | None:
        slots, planner, fields = self._slots, self._planner, self._decoding.inputs.next()
        planner.make_room()
        tiles = self._prefill(fields)
        shape = self._decoding.shape(slots.count, tiles)
        sampling = planner.decode(fields, shape.rows)
        self._keep_states(fields, shape)
        return self._decoding.step(shape, slots.count, slots.settings()) if sampling or tiles else None

    def _speculate(self, verified: Strategy, depth: int) -> None:
        """Verify what one strategy has drafted, and draft `depth` tokens more."""
        if self._flight is not None:
            self._drain()
        slots, planner, speculation = self._slots, self._planner, self._speculation
        assert speculation is not None
        with self._timeline.work():
            if depth and planner.head_lag():
                self._decoding.catch_up(slots, planner.table)
            fields, width = self._decoding.inputs.next(), speculation.width(verified.depth)
            planner.make_room(width - 1 + depth)
            tiles = self._prefill(fields)
            shape = self._decoding.shape(slots.count, tiles, width, follow=True)
            ready_N = planner.verify(fields, shape, depth)
            if not tiles and not ready_N.any():
                return
            self._keep_states(fields, shape)
            flight = self._decoding.step(shape, slots.count, slots.settings())
            if depth:
                self._decoding.draft(shape.rows, depth)
        flight.mark.wait()
        runs = speculation.record(flight, ready_N, depth)
        self._measure(flight, verified, int(ready_N.sum()), runs.tokens)
        self._record(runs.tokens, 0, runs.ended, runs.logprob_sum)

    def _keep_states(self, fields: Fields, shape: Shape) -> None:
        if self._capture is not None:
            self._capture.place(fields, shape, self._version if self._due is None else self._due)

    def _prefill(self, fields: Fields) -> int:
        """Tiles of prompts in the next step."""
        tiles = self._planner.prefill(fields)
        self._prefilled += int(fields.tile_count_J[:tiles].sum())
        self._cached = self._planner.cached
        fields.tile_count_J[tiles:] = 0
        return tiles

    def _collect(self, flight: Flight, rows_R: Column, place_R: Column) -> None:
        self._switch()
        flight.mark.wait()
        if len(rows_R):
            slots = self._slots
            logprob_R = flight.logprob_N_W[place_R, 0]
            sampled, ended = slots.keep(rows_R, slots.known[rows_R], flight.token_N_W[place_R, 0], logprob_R)
            self._measure(flight, PLAIN, sampled, sampled)
            self._record(sampled, 0, ended, float(logprob_R.sum()))
        self._passed = True

    def _measure(self, flight: Flight, strategy: Strategy, batch: int, tokens: int) -> None:
        """Steps that were mostly prompts say nothing about decoding; what is mostly is the same for all depths."""
        seconds, shape = self._clock.lap(), flight.shape
        if batch and shape.tiles * self._tile <= shape.rows * self._widest:
            self._chooser.record(batch, strategy, tokens, seconds)

    def _move_row(self, source: int, target: int) -> None:
        drafting = self._decoding.drafting
        if drafting is not None and self._slots.head_computed[source] < self._slots.computed[source]:
            with self._timeline.work():  # rows also move between steps
                drafting.move_row(source, target)

    def _release(self, job: Job) -> None:
        if self._capture is not None:
            self._capture.end(job)
        self._planner.release(job)
