"""Weights that leave the trainer in FP8: quantized on the fly, one tensor at a time, each with its scales behind it.

It wraps any source of publications, so that shards, transports, digests and deltas need not know. What cannot be
quantized is found once all of it is gathered, before the last of it is sent: to look at each tensor would stop the
trainer for each, and beside an engine on the same GPU that is some milliseconds every time.
"""

import torch
from torch import Tensor

from asyncrl.precision.layers import SCALES, is_quantized
from asyncrl.precision.quantizer import E4M3, SIDE, WEIGHT_BLOCK, check_finite, quantize_unchecked
from asyncrl.precision.settings import Fp8
from asyncrl.types import TensorSpec
from asyncrl.weights.gather import Source
from asyncrl.weights.manifest import layout


class Fp8Source:
    def __init__(self, inner: Source, layers: int, fp8: Fp8) -> None:
        """`inner` has the weights as the trainer computes with them; what is not quantized travels in bf16."""
        self._inner, self._layers, self._fp8 = inner, layers, fp8
        self._plain: dict[str, TensorSpec] = {}
        self._laid_out: tuple[tuple[TensorSpec, ...], int] = (), 0
        """For the weights in `_plain`."""
        self._scales: dict[str, Tensor | None] = {}
        self._unchecked: list[tuple[str, Tensor]] = []
        self._left = 0
        """Tensors that are still to be gathered."""

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        plain = {spec.name: spec for spec in self._inner.layout()[0]}
        if plain != self._plain:  # once, as Python takes long for it
            self._plain, self._laid_out = plain, self._lay_out(plain)
        self._left, self._scales, self._unchecked = len(self._laid_out[0]), {}, []
        return self._laid_out

    def _lay_out(self, plain: dict[str, TensorSpec]) -> tuple[tuple[TensorSpec, ...], int]:
        found: list[tuple[str, Tensor]] = []
        for spec in plain.values():
            if self._quantizes(spec.name):
                blocks = [-(-size // SIDE) for size in spec.shape]
                found.append((spec.name, torch.empty(spec.shape, dtype=E4M3, device="meta")))
                found.append((spec.name + SCALES, torch.empty(blocks, device="meta")))
            else:
                found.append((spec.name, torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")))
        return layout(found)

    def gather(self, spec: TensorSpec) -> Tensor | None:
        """Scales come from the tensor before them."""
        self._left -= 1
        if spec.name in self._scales:
            return self._scales.pop(spec.name)
        tensor = self._inner.gather(self._plain[spec.name])
        if not self._quantizes(spec.name):
            return None if tensor is None else tensor.bfloat16()
        if tensor is None:
            self._scales[spec.name + SCALES] = None
            return None
        found = quantize_unchecked(tensor, WEIGHT_BLOCK, power_of_two=self._fp8.power_of_two)
        self._scales[spec.name + SCALES] = found.scales_B_B
        self._unchecked.append((spec.name, found.scales_B_B))
        return found.values_N_C

    def fence(self) -> None:
        if not self._left:
            unchecked, self._unchecked = self._unchecked, []
            check_finite(unchecked)
        self._inner.fence()

    def _quantizes(self, name: str) -> bool:
        return is_quantized(name, self._layers, keep_first=self._fp8.keep_first, keep_last=self._fp8.keep_last)
