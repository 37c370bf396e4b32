"""Captured CUDA graphs, one for each kind and shape of a step, in one pool of memory.

Launching a step kernel by kernel takes the host longer than the device needs to run it; a graph is one launch. The
first steps of a shape run kernel by kernel, which also compiles what is missing; then it is captured. Graphs never run
at the same time, so they share the memory of their intermediate results: capturing the largest first lets the others
fit into what it took. Where the pool has reached its bound, further shapes go on kernel by kernel.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch

from asyncrl.engines.native.cuda.timeline import Timeline

log = logging.getLogger(__name__)


class GraphPool:
    def __init__(self, timeline: Timeline, bound_bytes: int, after: int = 2) -> None:
        self._timeline, self._bound, self._after = timeline, bound_bytes, after
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if timeline.stream is not None else None
        self.bytes = 0
        """Memory taken by all captures so far."""

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Do what `launch` does; its inputs and results must stay at the same addresses."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        self._seen[key] += 1
        if self._seen[key] >= self._after:
            self.capture(key, launch)

    def capture(self, key: Hashable, launch: Callable[[], object]) -> None:
        """For a shape that has run once, on the stream of the timeline; nothing happens on the device."""
        if self._timeline.stream is None or self.bytes >= self._bound:
            return
        self._timeline.wait()
        before = torch.cuda.mem_get_info(self._timeline.device)[0]
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage first. Other threads may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
        self._graphs[key] = graph
        self.bytes += max(0, before - torch.cuda.mem_get_info(self._timeline.device)[0])
        if self.bytes >= self._bound:
            log.warning("graphs take %.2f GiB, the bound is reached; further shapes run slower", self.bytes / 2**30)
