"""New weights into the tensors that decoding reads, and how much memory they leave for pages.

The published bytes are checked before anything is touched, so there is no copy of the old weights to fall back to.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cuda.fp8 import Fp8Serving, Load
from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Move
from asyncrl.engines.native.cuda.pages import pages_of
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.weight_loading import Receiver, check_fit
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.config import ModelConfig
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.types import TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.transports.registry import digest_published, published

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_STEP_BYTES = 1 << 30
"""Intermediate results of a step, and what CUDA itself takes."""


class Update:
    """A publication on its way into the tensors held."""

    def __init__(self, flat: Flat, held: dict[str, Tensor], at_once: Callable[[Flat], None] | None) -> None:
        """`at_once` makes all moves together; without it they are made one by one."""
        self._flat, self._held, self._at_once = flat, held, at_once

    def load(self, names: Iterable[str] | None = None) -> None:
        """All of it, or what has these names."""
        if names is None and self._at_once is not None:
            self._at_once(self._flat)
            return
        wanted = self._held if names is None else set(names)
        for spec in self._flat.specs:
            if spec.name in wanted:
                Move(spec, self._held[spec.name]).make(self._flat)


class Checked(NamedTuple):
    """A publication that may be loaded."""

    digest: str
    scales: tuple[LayerScales, ...]
    """Of keys and values in FP8."""
    update: Update
    probe: Callable[[Load], None] | None
    """In FP8, what is to be tried before the update is loaded."""


class Intake:
    """Checks publications for the tensors held, in a thread, while decoding goes on.

    The step loop needs the interpreter every few milliseconds, and to look at hundreds of tensors takes Python as long.
    So what was found out of one publication is kept: all are alike, wherever on the device they lie.
    """

    def __init__(
        self,
        held: dict[str, Tensor],
        timeline: Timeline,
        kernels: Kernels,
        fp8: Fp8Serving | None = None,
        middle: int = 0,
    ) -> None:
        """Layers before `middle` are not read any more by a step that has passed it."""
        self.held, self.fp8, self._timeline, self._kernels, self._middle = held, fp8, timeline, kernels, middle
        self._fitting: tuple[TensorSpec, ...] | None = None
        """What was last found to fit."""
        self._at_once: Callable[[Flat], None] | None = None

    def check(self, manifest: WeightManifest, receiver: Receiver) -> Checked:
        """All that can be done before the copy. It touches nothing."""
        if manifest.tensors != self._fitting:
            check_fit(manifest, self.held, receiver)
            self._fitting, self._at_once = manifest.tensors, None
        digest = digest_published(manifest)
        if digest != manifest.digest:
            raise WeightSyncError(
                f"engine {receiver.engine}: weights of version {manifest.version} have digest {digest}, published was "
                f"{manifest.digest}; {receiver.kept} is kept, publish again"
            )
        flat = published(manifest)
        if self.fp8 is None:
            return Checked(digest, (), self._update(flat), None)
        scales = self.fp8.kv_scales(manifest, flat, receiver)
        probe = partial(self.fp8.probe, self.fp8.expected(manifest, flat, receiver))
        return Checked(digest, scales, self._update(flat), probe)

    def _update(self, flat: Flat) -> Update:
        if flat.memory.device.type != self._timeline.device.type:
            return Update(flat, self.held, None)
        if self._at_once is None:
            self._at_once = self._in_halves(flat.specs)
        return Update(flat, self.held, self._at_once)

    def _in_halves(self, specs: Sequence[TensorSpec]) -> Callable[[Flat], None]:
        """Half of the copy beside the running step, half behind it: so requests wait for half of it twice."""
        parts: tuple[list[Move], list[Move]] = [], []
        for spec in specs:
            parts[_layer(spec.name) >= self._middle].append(Move(spec, self.held[spec.name]))
        early, late = map(self._kernels.mover, parts)

        def load(flat: Flat) -> None:
            with self._timeline.behind_middle():
                early(flat)
            late(flat)

        return load


def _layer(name: str) -> float:
    """What is no layer's is read at the end, too."""
    found = _LAYER.match(name)
    return int(found[1]) if found else math.inf


def page_count(config: ModelConfig, settings: Settings, device: torch.device, page_bytes: int, width: int) -> int:
    """Pages that the memory beside the weights holds, but no more than all rows can fill.

    `width` are the columns of a step's rows: all have logits.
    """
    longest = pages_of(settings.max_length)
    wanted = settings.max_batch * (longest + 1)
    if device.type != "cuda":
        return wanted
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    step = _STEP_BYTES + 4 * settings.max_batch * (width - 1) * config.vocabulary
    left = min(free, int(total * settings.memory) - taken) - int(settings.graph_memory_gib * 2**30) - step
    if left < (longest + 1) * page_bytes:
        raise EngineError(
            f"engine.memory={settings.memory} of {total / 2**30:.0f} GiB leaves {max(left, 0) / 2**30:.1f} GiB for "
            f"keys and values, and one answer of engine.max_length={settings.max_length} tokens needs "
            f"{(longest + 1) * page_bytes / 2**30:.1f}; raise engine.memory or lower engine.max_length"
        )
    return min(wanted, left // page_bytes)
