"""New weights into the tensors that decoding reads, and how much memory they leave for pages.

The published bytes are checked before anything is touched, so there is no copy of the old weights to fall back to.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.fp8 import Fp8Serving
from asyncrl.engines.native.cuda.pages import pages_of
from asyncrl.engines.native.published import Receiver, check_fit
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.config import ModelConfig
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.types import WeightManifest
from asyncrl.weights.transport import digest_published, published, read_published

_copy: Callable[[list[Tensor], list[Tensor]], None] = vars(torch)["_foreach_copy_"]
"""Public in all but its name: optimizers are built on it."""
_AT_ONCE = 64
"""Tensors copied by one call: those in host memory need as much again on the device meanwhile."""
_STEP_BYTES = 1 << 30
"""Intermediate results of a step, and what CUDA itself takes."""


def verify(manifest: WeightManifest, held: dict[str, Tensor], receiver: Receiver) -> str:
    """Digest of what was published, if it is what should have been, and fits. It touches nothing."""
    check_fit(manifest, held, receiver)
    digest = digest_published(manifest)
    if digest != manifest.digest:
        raise WeightSyncError(
            f"engine {receiver.engine}: weights of version {manifest.version} have digest {digest}, published was "
            f"{manifest.digest}; {receiver.kept} is kept, publish again"
        )
    return digest


class Checked(NamedTuple):
    """A publication that may be loaded."""

    digest: str
    scales: tuple[LayerScales, ...]
    """Of keys and values in FP8."""
    update: "Update"


def check(
    manifest: WeightManifest, held: dict[str, Tensor], receiver: Receiver, device: torch.device, fp8: Fp8Serving | None
) -> Checked:
    """All that can be done before decoding has to stop."""
    digest = verify(manifest, held, receiver)
    scales = fp8.kv_scales(manifest, receiver) if fp8 is not None else ()
    return Checked(digest, scales, Update(manifest, held, device))


class Pair(NamedTuple):
    name: str
    held: Tensor
    published: Tensor


class Update:
    """A publication on its way into the tensors held. What lies on the device is found when this is made.

    To find it takes the host longer than the copy takes the device; decoding goes on meanwhile.
    """

    def __init__(self, manifest: WeightManifest, held: dict[str, Tensor], device: torch.device) -> None:
        self._pairs = partial(_pairs, manifest, held, device)
        self._ready = list(self._pairs()) if published(manifest).memory.device.type == device.type else None

    def load(self, names: Iterable[str] | None = None) -> None:
        """All of it, or what has these names."""
        pairs = self._pairs() if self._ready is None else iter(self._ready)
        if names is not None:
            wanted = set(names)
            pairs = (pair for pair in pairs if pair.name in wanted)
        while some := list(islice(pairs, _AT_ONCE)):
            _copy([pair.held for pair in some], [pair.published for pair in some])


def _pairs(manifest: WeightManifest, held: dict[str, Tensor], device: torch.device) -> Iterator[Pair]:
    for name, tensor in read_published(manifest, device):
        yield Pair(name, _plain(held[name]), _plain(tensor))


def _plain(tensor: Tensor) -> Tensor:
    """FP8 as bytes: not every operation of torch knows it."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


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
