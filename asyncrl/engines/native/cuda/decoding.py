"""Steps on the device: launched one after the other, each read by the host while the next one runs.

    plan -> send -> graph (embed, layers, logits, sampling) -> board -> host
                      ^                                          |
                      +------- tokens of the next step ----------+

The result stays on the device as the input of the next step, so the device never waits for the host as long as
planning and recording take less time than a step. Rows with top-k or top-p are drawn once more, by torch, behind the
graph.

Prompts come in beside rows that decode, in so many combinations that few have a graph. Those that are frequent get one,
which reads the weights once for both; the others are run as two graphs, of which there are few: prompts, then rows.

With drafts a step has more columns, and is followed by a graph that drafts for the next one. The host has to know how
much was accepted before it can plan on; it reads that while the next drafts are made.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.device_outputs import DeviceOutputs, Flight
from asyncrl.engines.native.cuda.drafting import Drafting
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.hidden_capture import StatePool
from asyncrl.engines.native.cuda.inputs import Shape, Sizes, StepInputs
from asyncrl.engines.native.cuda.kernels.shapes import Drafts
from asyncrl.engines.native.cuda.memory import KvMemory
from asyncrl.engines.native.cuda.model import CudaModel
from asyncrl.engines.native.cuda.pages import Copy
from asyncrl.engines.native.sampling import Column, RowSettings, sample
from asyncrl.models.policy import Taps

_JOINED_AFTER = 32
"""Steps with so many tiles beside so many rows, until they are worth a graph of their own."""
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


class Decoding:
    def __init__(
        self,
        model: CudaModel,
        memory: KvMemory,
        sizes: Sizes,
        inputs: StepInputs,
        board: DeviceOutputs,
        graphs: GraphPool,
        drafting: Drafting | None = None,
        pool: StatePool | None = None,
    ) -> None:
        self.model, self.inputs, self.graphs, self.drafting, self.pool = model, inputs, graphs, drafting, pool
        self._board, self.memory = board, memory
        self._buckets = buckets(sizes.rows)
        self._coarse = [*(1 << power for power in range((sizes.rows - 1).bit_length())), sizes.rows]
        self._tiles = tile_counts(sizes.tiles)
        self._all_final = memory.routes_X_S_L_C is not None or (drafting is not None and drafting.taps() is None)
        tokens = sizes.rows * sizes.width + (sizes.tiles * sizes.tile if self._all_final else 0)
        self._settings_on_device: tuple[RowSettings, RowSettings | None] | None = None
        self._hidden_T_E = model.embedding_V_E.new_zeros(tokens, model.embedding_V_E.shape[1])

    def shape(self, rows: int, tiles: int, width: int = 1, *, follow: bool = False) -> Shape:
        """The smallest that fits. Where drafts come in, the steps of sizes are coarser: there are more kinds."""
        sizes = self._coarse if follow or width > 1 else self._buckets
        tiles = _fitting(self._tiles, tiles) if tiles else 0
        return Shape(_fitting(sizes, rows), width, tiles, follow and self.drafting is not None)

    def capture_all(self, depths: list[int]) -> None:
        """For rows and for tiles, the largest first. All of them are padding, so nothing is written."""
        wide = [Shape(rows, 1 + depth, 0, self.drafting is not None) for rows in self._coarse for depth in depths]
        shapes = [*wide, *map(Shape, self._buckets), *(Shape(0, 1, tiles) for tiles in self._tiles)]
        for shape in sorted(shapes, key=lambda shape: -sum(map(len, self.inputs.tokens(shape)))):
            self.graphs.run(shape, partial(self._launch, shape))
        for rows in reversed(self._coarse):
            for depth in depths:
                self.draft(rows, depth)

    def step(self, shape: Shape, rows: int, settings: RowSettings) -> Flight:
        """Run what the inputs say."""
        restricted = self._restricted(settings)  # before the step, for which it would wait
        self.inputs.send(rows)
        for part in self._parts(shape):
            self.graphs.run(part, partial(self._launch, part))
        if restricted is not None:
            self._draw_again(shape, rows, restricted)
        return self._board.read(shape)

    def draft(self, rows: int, depth: int) -> None:
        """For the next step, behind what this one has sampled; `rows` are padded."""
        if self.drafting is not None:
            launch = partial(self.drafting.draft, rows, depth, self.memory.head)
            self.graphs.run(("draft", rows, depth), launch)

    def catch_up(self, slots: BatchTable, table_N_P: Column) -> None:
        """Let the head follow the rows that it has left alone."""
        if self.drafting is not None:
            padded = _fitting(self._coarse, slots.count)
            self.drafting.catch_up(slots, table_N_P, padded, self.graphs, self.memory.head)

    def copy_pages(self, copies: Sequence[Copy]) -> None:
        self.memory.copy(copies)

    def _parts(self, shape: Shape) -> Sequence[Shape]:
        """Rows may decode behind tiles of the same step, so those come first."""
        if not shape.tiles or self.graphs.worthwhile(shape, _JOINED_AFTER):
            return [shape]
        return Shape(0, 1, shape.tiles), shape._replace(tiles=0)

    def _launch(self, shape: Shape) -> None:
        tokens, queries, count = self.inputs.tokens(shape), self.inputs.queries(shape), shape.rows * shape.width
        hidden_T_E = self._hidden_T_E[: sum(map(len, tokens)) if self._all_final else count]
        taps = self._taps()
        given = tokens, queries, self._board.ahead_W_B.view(-1), self.memory.layers
        routes = self.memory.routes_X_S_L_C
        self.model.forward(*given, hidden_T_E, taps, self.graphs.timeline.pass_middle, routes)
        if count:
            self._sample(shape, self.model.logits(hidden_T_E[:count]))
        if self.pool is not None and count:
            tapped = taps.found_T_E if taps is not None else []
            self.pool.write(self.inputs.device.kept_X[:count], [each[:count] for each in (hidden_T_E, *tapped)])
        if self.drafting is not None:
            read_T_R = hidden_T_E if taps is None else torch.cat(taps.found_T_E, -1)
            self.drafting.see(shape, read_T_R, self.memory.head)

    def _taps(self) -> Taps | None:
        """For a head that drafts, and for its training, which is of the same layers."""
        if self.drafting is not None:
            return self.drafting.taps()
        return Taps(self.pool.layers) if self.pool is not None and self.pool.layers else None

    def _sample(self, shape: Shape, logits_X_V: Tensor) -> None:
        device, board, rows, count = self.inputs.device, self._board, shape.rows, logits_X_V.shape[0]
        token_X, logprob_X, temperature_N = board.tokens(shape), board.logprobs(shape), device.temperature_N[:rows]
        if shape.width == 1:
            self.model.kernels.sample(logits_X_V, temperature_N, device.plain_X[:count], token_X, logprob_X)
            if shape.follow:
                board.accepted(rows).zero_()
            return
        grid = rows, shape.width
        drafts = Drafts(
            device.token_X[:count].view(grid),
            board.ahead_W_B,
            device.drafted_N[:rows],
            temperature_N,
            device.plain_X[:count].view(grid),
            device.accept_X[:count].view(grid),
            device.residual_X[:count].view(grid),
            None if self.drafting is None else self.drafting.proposals,
        )
        self.model.kernels.verify(logits_X_V, drafts, token_X, logprob_X, board.accepted(rows))

    def _restricted(self, settings: RowSettings) -> RowSettings | None:
        """Settings on the device where a row needs more than its temperature."""
        known = self._settings_on_device
        if known is None or known[0] is not settings:
            on_device = None
            if settings.top_k_N_1 is not None:
                device = self._hidden_T_E.device
                on_device = RowSettings(*(None if each is None else each.to(device) for each in settings))
            known = self._settings_on_device = settings, on_device
        return known[1]

    def _draw_again(self, shape: Shape, rows: int, settings: RowSettings) -> None:
        """The first column of rows that sample from a part of the vocabulary; they have no drafts."""
        assert settings.top_k_N_1 is not None
        assert settings.top_p_N_1 is not None
        end, step = rows * shape.width, shape.width
        logits_N_V = self.model.logits(self._hidden_T_E[:end:step].contiguous())
        found_N_1 = sample(logits_N_V, settings, self.inputs.device.plain_X[:end:step, None])
        again_N = ((settings.top_k_N_1 > 0) | (settings.top_p_N_1 < 1))[:, 0]
        for drawn_N_1, column_X in zip(
            found_N_1, (self._board.tokens(shape), self._board.logprobs(shape)), strict=True
        ):
            column_N = column_X[:end:step]
            column_N.copy_(torch.where(again_N, drawn_N_1[:, 0].to(column_N.dtype), column_N))


def _fitting(sizes: list[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)


def buckets(rows: int) -> list[int]:
    """Numbers of rows that steps are padded to."""
    large = range(_SMALL[-1] + 64, rows, 64)
    return [*(size for size in (*_SMALL, *large) if size < rows), rows]


def tile_counts(most: int) -> list[int]:
    """Numbers of tiles that prompts are padded to: powers of two, and the middles between them."""
    powers = [1 << power for power in range(most.bit_length())]
    sizes = {*powers, *(3 * power // 2 for power in powers[1:])}
    return [*sorted(size for size in sizes if size < most), most]
