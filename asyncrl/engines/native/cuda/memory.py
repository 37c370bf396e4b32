"""Keys and values of all layers on the device, in the number format of the run.

In FP8 each layer has a scale for its keys and one for its values, which lie on the device where captured graphs read
them. They are powers of two: from one version to the next most of them stay as they are, and where one changes, the
numbers stored under the old one are turned into the new one's without another rounding.
"""

from collections.abc import Sequence
from math import frexp, ldexp

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Kv
from asyncrl.engines.native.cuda.model import CudaModel
from asyncrl.engines.native.cuda.pages import PAGE, Copy
from asyncrl.engines.native.cuda.routes import new_route_pages
from asyncrl.models.config import ModelConfig
from asyncrl.models.routes import RouteShape
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.precision.quantizer import E4M3, to_e4m3

_AT_ONCE = 256
"""Pages of a layer that are rescaled together; they are floats meanwhile."""
COPIED_BYTES = 1 << 27
"""Of pages that are copied together, and lie in memory once more meanwhile."""


class KvMemory:
    def __init__(
        self, model: CudaModel, pages: int, *, fp8: bool, head: bool, routes: RouteShape | None = None
    ) -> None:
        """`head`: with a layer more for a drafting head, which is never in FP8. `routes`: with those of each token."""
        count = len(model.blocks)
        self._pages = model.new_pages(pages, PAGE, count, E4M3 if fp8 else None)
        self._head_pages = model.new_pages(pages, PAGE, int(head))
        self.routes_X_S_L_C = None if routes is None else new_route_pages(routes, pages, self._pages.device)
        beside = [] if self.routes_X_S_L_C is None else [self.routes_X_S_L_C[None, None]]
        self._words = [
            (each.flatten(3).view(torch.int64), max(1, COPIED_BYTES * pages // each.nbytes))
            for each in (self._pages, self._head_pages, *beside)
            if len(each)
        ]
        """Pages as integers, because not every kernel knows FP8, and how many are copied together."""
        self._scales_L_2 = torch.ones(count, 2, device=self._pages.device) if fp8 else None
        scales = [None] * count if self._scales_L_2 is None else self._scales_L_2.unbind()
        self.layers = [Kv(*each) for each in zip(self._pages.unbind(), scales, strict=True)]

    @property
    def head(self) -> Kv:
        return Kv(self._head_pages[0])

    @property
    def scales(self) -> list[list[float]]:
        """Of keys and values by layer; empty where nothing is in FP8."""
        return [] if self._scales_L_2 is None else self._scales_L_2.tolist()

    def copy(self, copies: Sequence[Copy]) -> None:
        """No page may be a source and a target."""
        device = self._pages.device
        # From pinned memory: the host would wait for the running step otherwise.
        places_2_K = torch.tensor(list(zip(*copies, strict=True)), pin_memory=device.type == "cuda")
        places_2_K = places_2_K.to(device, non_blocking=True)
        for words, at_once in self._words:
            for first in range(0, len(copies), at_once):
                source_K, target_K = places_2_K[:, first : first + at_once]
                words.index_copy_(2, target_K, words.index_select(2, source_K))

    def rescale(self, given: tuple[LayerScales, ...]) -> None:
        """Use these from now on, also for what is stored already."""
        assert self._scales_L_2 is not None
        new = [[power_of_two(k), power_of_two(v)] for _, k, v in given]
        for layer, (before, after) in enumerate(zip(self.scales, new, strict=True)):
            for kind, (old, scale) in enumerate(zip(before, after, strict=True)):
                if old != scale:
                    _multiply(self._pages[layer, kind], old / scale)
        self._scales_L_2.copy_(torch.tensor(new))


def page_bytes(
    config: ModelConfig, dtype: torch.dtype, *, fp8: bool, head: bool, routes: RouteShape | None = None
) -> int:
    """Of a page in all layers."""
    size = config.layers * (E4M3 if fp8 else dtype).itemsize + head * dtype.itemsize
    return PAGE * (2 * config.kv_heads * config.head_dim * size + (0 if routes is None else routes.token_bytes))


def power_of_two(scale: float) -> float:
    """The next one that is not smaller."""
    mantissa, exponent = frexp(scale)
    return ldexp(1.0, exponent - (mantissa == 0.5))


def _multiply(pages: Tensor, factor: float) -> None:
    for some in pages.split(_AT_ONCE):
        some.copy_(to_e4m3(some.float() * factor))
