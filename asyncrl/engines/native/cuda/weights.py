"""New weights into the tensors that decoding reads, and how much memory they leave for pages.

The published bytes are checked before anything is touched, so there is no copy of the old weights to fall back to.
"""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.adapters import check_adapters, has_adapters
from asyncrl.engines.native.cuda.adapters import AdapterUpdate, Base
from asyncrl.engines.native.cuda.fp8 import Fp8Serving, Load
from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Move
from asyncrl.engines.native.cuda.pages import pages_of
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.cuda.updates import CopyUpdate, Update
from asyncrl.engines.native.weight_loading import Receiver, check_fit, wrong_digest
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.config import ModelConfig
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.types import TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.transports.registry import digest_published, published

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_STEP_BYTES = 1 << 30
"""Intermediate results of a step, and what CUDA itself takes."""


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
        base: Base | None = None,
    ) -> None:
        """Layers before `middle` are not read any more by a step that has passed it; adapters are added to `base`."""
        self.held, self.fp8, self._timeline, self._kernels, self._middle = held, fp8, timeline, kernels, middle
        self._base = base
        self._fitting: tuple[TensorSpec, ...] | None = None
        """What was last found to fit."""
        self._at_once: Callable[[Flat], None] | None = None

    def check(self, manifest: WeightManifest, receiver: Receiver) -> Checked:
        """All that can be done before tensors change. It touches nothing."""
        base = self._base if has_adapters(manifest) else None
        if manifest.tensors != self._fitting:
            if has_adapters(manifest):
                check_adapters(manifest, {} if base is None else base.shapes, f"engine {receiver.engine}")
            else:
                check_fit(manifest, self.held, receiver)
            self._fitting, self._at_once = manifest.tensors, None
        digest = digest_published(manifest)
        if digest != manifest.digest:
            raise WeightSyncError(wrong_digest(manifest, digest, receiver))
        flat = published(manifest)
        update = self._copies(flat) if base is None else self._merges(flat, base)
        if self.fp8 is None:
            return Checked(digest, (), update, None)
        scales = self.fp8.kv_scales(manifest, update, receiver)
        probe = partial(self.fp8.probe, self.fp8.expected(manifest, update, receiver))
        return Checked(digest, scales, update, probe)

    def _copies(self, flat: Flat) -> CopyUpdate:
        if flat.memory.device.type != self._timeline.device.type:
            return CopyUpdate(flat, self.held, None)
        if self._at_once is None:
            moves = {spec.name: Move(spec, self.held[spec.name]) for spec in flat.specs}
            early, late = ([moves[name] for name in half] for half in self._halves(moves))
            self._at_once = self._in_halves(self._kernels.mover(early), self._kernels.mover(late))
        return CopyUpdate(flat, self.held, self._at_once)

    def _merges(self, flat: Flat, base: Base) -> AdapterUpdate:
        if flat.memory.device.type != self._timeline.device.type:  # few bytes, beside decoding
            flat = Flat(flat.specs, self._timeline.bring(flat.memory))
        merges = partial(base.merges, flat.specs, self.held, power_of_two=self._power_of_two)
        if self._at_once is None:
            early, late = map(merges, self._halves(self.held))
            self._at_once = self._in_halves(self._kernels.merger(early), self._kernels.merger(late))
        return AdapterUpdate(flat, self.held, base, self._kernels, self._at_once, power_of_two=self._power_of_two)

    @property
    def _power_of_two(self) -> bool:
        return self.fp8 is not None and self.fp8.power_of_two

    def _halves(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """What a step that has passed its middle does not read any more, and the rest."""
        found: tuple[list[str], list[str]] = [], []
        for name in names:
            found[_layer(name) >= self._middle].append(name)
        return found

    def _in_halves(self, early: Callable[[Flat], None], late: Callable[[Flat], None]) -> Callable[[Flat], None]:
        """Half of the work beside the running step, half behind it: so requests wait for half of it twice."""

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
