"""Captured CUDA graphs, one for each kind and shape of a step, in one pool of memory.

Launching a step kernel by kernel takes the host longer than the device needs to run it; a graph is one launch. What
has no graph yet runs kernel by kernel, which also compiles what is missing; then it is captured. Graphs never run at
the same time, so they share the memory of their intermediate results: capturing the largest first lets the others fit
into what it took. Where the pool has reached its bound, nothing more is captured.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch

from asyncrl.engines.native.cuda.timeline import Timeline

log = logging.getLogger(__name__)
_BESIDE = 16 << 20
"""Bytes that CUDA itself may take for a graph. What else the card has less of afterwards, others took meanwhile: a
trainer on the same card grows while the first steps are captured."""


class GraphPool:
    def __init__(self, timeline: Timeline, bound_bytes: int) -> None:
        self.timeline, self._bound = timeline, bound_bytes
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._asked: Counter[Hashable] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if timeline.stream is not None else None
        self.bytes = 0
        """Memory taken by all captures so far."""

    @property
    def count(self) -> int:
        return len(self._graphs)

    @property
    def full(self) -> bool:
        return self.bytes >= self._bound

    def worthwhile(self, key: Hashable, after: int) -> bool:
        """Whether there is a graph, or should be one because this was asked so often."""
        self._asked[key] += 1
        return key in self._graphs or (self._asked[key] > after and not self.full)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Do what `launch` does; its inputs and results must stay at the same addresses."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        self._capture(key, launch)

    def _capture(self, key: Hashable, launch: Callable[[], object]) -> None:
        """For what has run once, on the stream of the timeline; nothing happens on the device."""
        if self.timeline.stream is None or self.full:
            return
        self.timeline.wait()
        free, reserved = self._memory()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage first. Other threads may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        launch()
        graph.capture_end()
        self._graphs[key] = graph
        free_now, reserved_now = self._memory()
        self.bytes += max(0, min(free - free_now, reserved_now - reserved + _BESIDE))
        if self.full:
            log.warning("graphs take %.2f GiB, the bound is reached; further shapes run slower", self.bytes / 2**30)

    def _memory(self) -> tuple[int, int]:
        """What the card has left, and what this process has of it for tensors."""
        device = self.timeline.device
        return torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
