"""Steps on the device: launched one after the other, each read by the host while the next one runs.

    plan -> send -> graph (embed, layers, logits, sampling) -> result -> host
                      ^                                          |
                      +------- tokens of the next step ----------+

The result stays on the device as the input of the next step, so the device never waits for the host as long as
planning and recording take less time than a step. Rows with top-k or top-p are drawn once more, by torch, behind the
graph.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.inputs import Shape, Sizes, StepInputs
from asyncrl.engines.native.cuda.model import CudaModel
from asyncrl.engines.native.cuda.pages import Copy
from asyncrl.engines.native.cuda.timeline import Mark, Timeline
from asyncrl.engines.native.sampling import Column, RowSettings, sample

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


class Flight(NamedTuple):
    """A launched step, and where the host finds its result."""

    mark: Mark
    token_N: Column
    logprob_N: Column


class Decoding:
    def __init__(self, model: CudaModel, pages: Tensor, sizes: Sizes, timeline: Timeline, graphs: GraphPool) -> None:
        self.model, self.inputs, self.graphs = model, StepInputs(sizes, timeline), graphs
        self._pages, self._kv, self._timeline = pages, pages.unbind(), timeline
        self._buckets = buckets(sizes.rows)
        self._tiles = [1 << power for power in range((sizes.tiles - 1).bit_length())] + [sizes.tiles]
        self._result_2_N = torch.zeros(2, sizes.rows, dtype=torch.int32, device=timeline.device)
        self._hidden_N_E = pages.new_zeros(sizes.rows, model.embedding_V_E.shape[1])
        self._read = [timeline.pinned(2, sizes.rows) for _ in range(2)]

    def shape(self, rows: int, tiles: int) -> Shape:
        """The smallest that fits."""
        padded = next(size for size in self._buckets if size >= rows)
        return Shape(padded, 1, next(size for size in self._tiles if size >= tiles) if tiles else 0)

    def capture_all(self) -> None:
        """For steps without tiles. All rows are padding, so nothing is written."""
        for rows in reversed(self._buckets):
            launch = partial(self._launch, Shape(rows))
            launch()
            self.graphs.capture(Shape(rows), launch)

    def step(self, shape: Shape, rows: int, restricted: RowSettings | None) -> Flight:
        """Run what the inputs say."""
        self.inputs.send(rows)
        self.graphs.run(shape, partial(self._launch, shape))
        if restricted is not None:
            self._draw_again(shape, rows, restricted)
        self._read.reverse()
        read = self._read[0]
        read.copy_(self._result_2_N, non_blocking=True)  # all of it: a part would be gathered first, and waited for
        host = read.numpy()
        return Flight(self._timeline.mark(), host[0], host[1].view("float32"))

    def copy_page(self, copy: Copy) -> None:
        self._pages[:, :, copy.target].copy_(self._pages[:, :, copy.source])

    def _launch(self, shape: Shape) -> None:
        inputs, rows = self.inputs, shape.rows
        sampled_N, hidden_N_E = self._result_2_N[0], self._hidden_N_E[:rows]
        self.model.forward(inputs.tokens(shape), inputs.queries(shape), sampled_N, self._kv, hidden_N_E)
        logits_N_V = self.model.logits(hidden_N_E)
        logprob_N = self._result_2_N[1, :rows].view(torch.float32)
        temperature_N, uniform_N = inputs.temperature(shape), inputs.uniform(shape)
        self.model.kernels.sample(logits_N_V, temperature_N, uniform_N, sampled_N[:rows], logprob_N)

    def _draw_again(self, shape: Shape, rows: int, settings: RowSettings) -> None:
        logits_N_V = self.model.logits(self._hidden_N_E[:rows])
        uniform_N_1 = self.inputs.uniform(shape)[:rows, None]
        token_N_1, logprob_N_1 = sample(logits_N_V, settings, uniform_N_1)
        self._result_2_N[0, :rows] = token_N_1[:, 0]
        self._result_2_N[1, :rows].view(torch.float32).copy_(logprob_N_1[:, 0])


def buckets(rows: int) -> list[int]:
    """Numbers of rows that steps are padded to."""
    large = range(_SMALL[-1] + 64, rows, 64)
    return [*(size for size in (*_SMALL, *large) if size < rows), rows]
