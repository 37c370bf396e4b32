"""What a rank computed in one step and what travelled between ranks meanwhile, by torch's profiler.

The file is a trace for Perfetto. How much of the travelling was hidden behind computing is counted from the same spans:
on a GPU from kernels, those of NCCL against all others; on a CPU from operations, those of gloo, which has threads of
its own, against torch's.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.system.storage import storing

TRAVEL = ("nccl", "gloo:")
"""How the names of collectives begin."""
WORK = "aten::"
"""How the names of operations on a CPU begin."""
Span = tuple[float, float]


class Overlap(NamedTuple):
    """Seconds of one step."""

    travelled: float
    """In which something was on its way between ranks."""
    hidden: float
    """Of these, in which the rank computed as well."""

    @classmethod
    def of(cls, travel: Iterable[Span], work: Iterable[Span]) -> Self:
        """Spans of one kind may overlap each other; each moment counts once."""
        edges = sorted(
            (moment, number, step)
            for number, spans in enumerate((travel, work))
            for begin, end in spans
            for moment, step in ((begin, 1), (end, -1))
        )
        running, travelled, hidden = [0, 0], 0.0, 0.0
        for (moment, number, step), (following, *_) in pairwise(edges):
            running[number] += step
            if running[0]:
                travelled += following - moment
                hidden += (following - moment) * (running[1] > 0)
        return cls(travelled, hidden)


class StepProfile:
    """Begins at once; to be ended by the same thread, which computes in between."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self._on_gpu = path, device.type == "cuda"
        gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()

    def end(self) -> Overlap:
        """Writes the trace."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
        travel, work = list[Span](), list[Span]()
        for event in self._profile.events() or ():
            span = event.time_range.start / 1e6, event.time_range.end / 1e6
            if event.device_type.name != ("CUDA" if self._on_gpu else "CPU"):
                continue
            if event.name.startswith(TRAVEL):
                travel.append(span)
            elif self._on_gpu or event.name.startswith(WORK):
                work.append(span)
        return Overlap.of(travel, work)
