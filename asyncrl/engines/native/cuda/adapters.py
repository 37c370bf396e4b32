"""Published adapters into the matrices that decoding reads: the base they are added to stays on the device.

Axis suffixes: L layers, O outputs, I inputs.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from asyncrl.engines.adapters import Shapes
from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Merge
from asyncrl.models import lora
from asyncrl.precision.layers import PROJECTION, SCALES
from asyncrl.precision.quantizer import WEIGHT_BLOCK, quantize_unchecked
from asyncrl.types import TensorSpec
from asyncrl.weights.flat import Flat


class Base:
    """The adapted projections as the engine was started with them, all layers of each in one tensor."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], adapted: Collection[str]) -> None:
        chosen = ((name, each) for name, each in named if PROJECTION.fullmatch(name) and name.split(".")[-2] in adapted)
        self._every = {name: torch.stack(found) for name, found in lora.stacks(chosen).items()}

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(base_L_O_I.shape) for name, base_L_O_I in self._every.items()}

    def of(self, name: str) -> tuple[Tensor, str, int] | None:
        """The matrix of a layer, its module's name for all layers, and the layer; None: it has no adapters."""
        every, layer = lora.split_layer(name)
        found = self._every.get(every)
        return None if found is None or layer is None else (found[layer], every.removesuffix(".weight"), layer)

    def merges(
        self, specs: Sequence[TensorSpec], held: dict[str, Tensor], names: Iterable[str], *, power_of_two: bool
    ) -> list[Merge]:
        """How the tensors of these names come from a publication of these specs and the base."""
        published, wanted, merges = {spec.name: spec for spec in specs}, set(names), list[Merge]()
        for every, base_L_O_I in self._every.items():
            module = every.removesuffix(".weight")
            down, up = published[module + lora.A], published[module + lora.B]
            layers = {layer: every.replace(lora.EVERY, str(layer)) for layer in range(len(base_L_O_I))}
            for in_fp8 in (False, True):
                chosen = {n: own for n, own in layers.items() if own in wanted and (own + SCALES in held) == in_fp8}
                targets = [held[own] for own in chosen.values()]
                scales = [held[own + SCALES] for own in chosen.values()] if in_fp8 else []
                if targets:
                    merges.append(Merge(down, up, base_L_O_I, list(chosen), targets, scales, power_of_two))
        return merges


class AdapterUpdate:
    """Adapters on their way into the tensors held."""

    def __init__(
        self,
        flat: Flat,
        held: dict[str, Tensor],
        base: Base,
        kernels: Kernels,
        at_once: Callable[[Flat], None],
        *,
        power_of_two: bool,
    ) -> None:
        """`at_once` merges all of them; `flat` is on the device."""
        self._flat, self._held, self._base, self._kernels, self._at_once = flat, held, base, kernels, at_once
        self._power_of_two = power_of_two
        self._specs = {spec.name: spec for spec in flat.specs}
        self._scales: dict[str, Tensor] = {}

    @property
    def place(self) -> Hashable:
        return self._flat.memory.data_ptr(), hash(self._flat.specs)

    def load(self, names: Iterable[str] | None = None) -> None:
        if names is None:
            self._at_once(self._flat)
            return
        merges = self._base.merges(self._flat.specs, self._held, names, power_of_two=self._power_of_two)
        self._kernels.merger(merges)(self._flat)

    def find(self, name: str) -> Tensor:
        """Made by torch, which the kernels are held against."""
        if name in self._scales:
            return self._scales.pop(name)
        found = self._base.of(name)
        if found is None:
            return self._held[name]
        base_O_I, module, layer = found
        down_L_R_I, up_L_O_R = (self._flat.tensor(self._specs[module + kind]) for kind in (lora.A, lora.B))
        merged_O_I = lora.merge(base_O_I, down_L_R_I[layer], up_L_O_R[layer])
        if name + SCALES not in self._held:
            return merged_O_I
        quantized = quantize_unchecked(merged_O_I, WEIGHT_BLOCK, power_of_two=self._power_of_two)
        self._scales[name + SCALES] = quantized.scales_B_B
        return quantized.values_N_C
