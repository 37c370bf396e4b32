"""What keys and values a version has, before it is served: fixed prompts, computed with weights that lie elsewhere.

A forward pass that is launched kernel by kernel takes Python 50 ms (H200, 8B), beside a step loop that needs the
interpreter as well. But publications come to the same few places of memory again and again, so the pass over each is
captured, and the next time it is one launch.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.kernels.shapes import Kv, Queries
from asyncrl.engines.native.cuda.model import Block, CudaModel
from asyncrl.engines.native.cuda.pages import PAGE
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.precision.kv_scales import LayerScales, fixed_samples, scales_of

_TILE = 16
_GRAPH_BYTES = 1 << 30
"""For the matrices of one layer, put together, and what is computed with them."""
Weights = Callable[[], tuple[Tensor, Iterable[tuple[Tensor, Block]]]]
"""Embeddings, and each layer with its first norm."""


class KvGauge:
    """Used by one thread at a time, beside decoding and behind it."""

    def __init__(self, model: CudaModel, length: int) -> None:
        samples = [sample[:length] for sample in fixed_samples(model.embedding_V_E.shape[0])]
        self._model, device = model, model.embedding_V_E.device
        self._queries, self._tokens_T = _tiles(samples, device)
        self._kv, self._length = Kv(model.new_pages(len(samples), PAGE, 1)[0]), len(samples[0])
        """One layer's pages serve all layers."""
        self._largest_L_2_T = torch.zeros(len(model.blocks), 2, len(samples) * self._length, device=device)
        self._graphs = GraphPool(Timeline(device, urgent=False), _GRAPH_BYTES)

    def scales(self, weights: Weights, place: Hashable = None) -> tuple[LayerScales, ...]:
        """`place` says where the weights lie, if they may come there again."""
        with self._graphs.timeline.work():
            launch = partial(self._launch, weights)
            if place is not None and self._graphs.worthwhile(place, after=1):
                self._graphs.run(place, launch)
            else:
                launch()
            return scales_of(self._largest_L_2_T)

    def _launch(self, weights: Weights) -> None:
        embedding_V_E, layers = weights()
        x_T_E, queries = embedding_V_E[self._tokens_T], [self._queries]
        for (norm_E, block), largest_2_T in zip(layers, self._largest_L_2_T, strict=True):
            x_T_E = self._model.layer(norm_E, block, x_T_E, queries, queries, self._kv)
            stored_2_X_K_S_D = self._kv.pages_2_X_K_S_D[:, :, :, : self._length]
            largest_2_T.copy_(stored_2_X_K_S_D.abs().amax((2, 4)).flatten(1))


def _tiles(samples: Sequence[Sequence[int]], device: torch.device) -> tuple[Queries, Tensor]:
    """All samples as tiles of a row each, which has one page; they are of one length, and no longer than a page."""
    length = len(samples[0])
    starts = list(range(0, length, _TILE))
    row_G, start_G = ([r for r in range(len(samples)) for _ in starts], starts * len(samples))
    count_G = [min(_TILE, length - start) for start in start_G]
    tokens = torch.zeros(len(row_G), _TILE, dtype=torch.int64)
    for group, (row, start, count) in enumerate(zip(row_G, start_G, count_G, strict=True)):
        tokens[group, :count] = torch.tensor(samples[row][start : start + count])
    groups_3_G = torch.tensor([row_G, start_G, count_G], dtype=torch.int32, device=device)
    table_N_P = torch.arange(len(samples), dtype=torch.int32, device=device)[:, None]
    queries = Queries(_TILE, groups_3_G[0], groups_3_G[1], groups_3_G[2], table_N_P)
    return queries, tokens.flatten().to(device)
