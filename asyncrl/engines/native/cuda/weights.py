"""New weights into the tensors that decoding reads, and how much memory they leave for pages.

The published bytes are checked before anything is touched, so there is no copy of the old weights to fall back to.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.fp8 import Fp8Serving
from asyncrl.engines.native.cuda.pages import pages_of
from asyncrl.engines.native.published import Receiver, check_fit
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.config import ModelConfig
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.types import TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.transport import digest_published, published

_copy: Callable[[list[Tensor], list[Tensor]], None] = vars(torch)["_foreach_copy_"]
"""Public in all but its name: optimizers are built on it."""
_AT_ONCE = 64
"""Tensors from host memory that are copied by one call: they need as much again on the device meanwhile."""
_LARGE = 16 << 20
"""From so many bytes on a tensor is copied by itself, at the full speed of the memory. A call for many cuts them into
launches, each with an end in which the memory idles; it saves time where a launch for each would take longer."""
_WORD = torch.int64
"""What calls for many copy, whatever the numbers are: each thread moves four, and with two bytes each too little would
be on its way to keep the memory busy. Nor do such calls look at whether all tensors held are of one type."""
_STEP_BYTES = 1 << 30
"""Intermediate results of a step, and what CUDA itself takes."""


class Pair(NamedTuple):
    name: str
    held: Tensor
    published: Tensor
    alone: bool
    """Copied by itself."""


class Update:
    """A publication on its way into the tensors held."""

    def __init__(self, pairs: Callable[[], Iterable[Pair]], at_once: int, place: Hashable | None = None) -> None:
        """`place` is equal for publications at the same addresses of the device."""
        self._pairs, self._at_once, self.place = pairs, at_once, place

    def load(self, names: Iterable[str] | None = None) -> None:
        """All of it, or what has these names."""
        pairs = iter(self._pairs())
        if names is not None:
            wanted = set(names)
            pairs = (pair for pair in pairs if pair.name in wanted)
        while some := list(islice(pairs, self._at_once)):
            for pair in (pair for pair in some if pair.alone):
                pair.held.copy_(pair.published)
            if small := [pair for pair in some if not pair.alone]:
                _copy([pair.held for pair in small], [pair.published for pair in small])


class Checked(NamedTuple):
    """A publication that may be loaded."""

    digest: str
    scales: tuple[LayerScales, ...]
    """Of keys and values in FP8."""
    update: Update


class Intake:
    """Checks publications for the tensors held, in a thread, while decoding goes on.

    The step loop needs the interpreter every few milliseconds, and to look at hundreds of tensors takes Python as long.
    So what was found out is kept: publications are alike, and lie at the same few places on the device.
    """

    def __init__(self, held: dict[str, Tensor], device: torch.device, fp8: Fp8Serving | None = None) -> None:
        self.held, self.fp8, self._device = held, fp8, device
        self._fitting: tuple[TensorSpec, ...] | None = None
        """What was last found to fit."""
        self._updates = WeakKeyDictionary[Flat, Update]()
        """Weak, because they hold memory as large as the model, which others may want to let go."""

    def check(self, manifest: WeightManifest, receiver: Receiver) -> Checked:
        """All that can be done before the copy. It touches nothing."""
        if manifest.tensors != self._fitting:
            check_fit(manifest, self.held, receiver)
            self._fitting = manifest.tensors
        digest = digest_published(manifest)
        if digest != manifest.digest:
            raise WeightSyncError(
                f"engine {receiver.engine}: weights of version {manifest.version} have digest {digest}, published was "
                f"{manifest.digest}; {receiver.kept} is kept, publish again"
            )
        scales = self.fp8.kv_scales(manifest, receiver) if self.fp8 is not None else ()
        return Checked(digest, scales, self._update(published(manifest)))

    def _update(self, flat: Flat) -> Update:
        find = partial(_pairs, flat, self.held, self._device)
        if flat.memory.device.type != self._device.type:
            return Update(find, _AT_ONCE)  # brought to the device when they are loaded
        update = self._updates.get(flat)
        if update is None:
            pairs = list(find())
            update = self._updates[flat] = Update(lambda: pairs, len(pairs), place=object())
        return update


def _pairs(flat: Flat, held: dict[str, Tensor], device: torch.device) -> Iterator[Pair]:
    for name, tensor in flat.tensors():
        yield _pair(name, held[name], tensor.to(device))


def _pair(name: str, held: Tensor, published: Tensor) -> Pair:
    if held.dtype == published.dtype and _has_words(held) and _has_words(published):
        words = (tensor.view(-1).view(_WORD) for tensor in (held, published))
        return Pair(name, *words, alone=held.nbytes >= _LARGE)
    return Pair(name, _plain(held), _plain(published), alone=True)


def _has_words(tensor: Tensor) -> bool:
    begin = tensor.storage_offset() * tensor.itemsize
    return tensor.is_contiguous() and not begin % _WORD.itemsize and not tensor.nbytes % _WORD.itemsize


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
