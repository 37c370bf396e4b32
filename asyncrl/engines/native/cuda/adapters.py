"""Published adapters into the matrices that decoding reads: the base they are added to stays on the device.

Axis suffixes: M matrices of all layers and experts, O outputs, I inputs, R rank.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.adapters import Shapes, shapes_of
from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Merge
from asyncrl.models import lora
from asyncrl.precision.layers import PROJECTION, SCALES
from asyncrl.precision.quantizer import WEIGHT_BLOCK, quantize_unchecked
from asyncrl.types import TensorSpec
from asyncrl.weights.flat import Flat


class Stack(NamedTuple):
    """The matrices that one published pair of adapters belongs to: of all layers and, in each, of all experts."""

    names: Sequence[str]
    base_M_O_I: Tensor


class Base:
    """The adapted projections as the engine was started with them."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], adapted: Collection[str]) -> None:
        chosen = [(name, each) for name, each in named if PROJECTION.fullmatch(name) and name.split(".")[-2] in adapted]
        of_layers: dict[str, list[tuple[str, Tensor]]] = {}
        for name, each in chosen:
            of_layers.setdefault(lora.for_experts(name), []).append((name, each))
        self.shapes: Shapes = shapes_of(chosen)
        self._stacks: dict[str, Stack] = {}
        for every, layers in lora.stacks(of_layers.items()).items():
            names, matrices = zip(*chain.from_iterable(layers), strict=True)
            self._stacks[every.removesuffix(".weight")] = Stack(names, torch.stack(matrices))
        self._places = {name: (m, n) for m, stack in self._stacks.items() for n, name in enumerate(stack.names)}

    def of(self, name: str) -> tuple[Tensor, str, int] | None:
        """The matrix, the module that its adapters are published for, and its number there; None: it has none."""
        if (place := self._places.get(name)) is None:
            return None
        module, number = place
        return self._stacks[module].base_M_O_I[number], module, number

    def merges(
        self, specs: Sequence[TensorSpec], held: dict[str, Tensor], names: Iterable[str], *, power_of_two: bool
    ) -> list[Merge]:
        """How the tensors of these names come from a publication of these specs and the base."""
        published, wanted, merges = {spec.name: spec for spec in specs}, set(names), list[Merge]()
        for module, stack in self._stacks.items():
            down, up = published[module + lora.A], published[module + lora.B]
            own = {number: name for number, name in enumerate(stack.names) if name in wanted}
            for in_fp8 in (False, True):
                chosen = {number: name for number, name in own.items() if (name + SCALES in held) == in_fp8}
                targets = [held[name] for name in chosen.values()]
                scales = [held[name + SCALES] for name in chosen.values()] if in_fp8 else []
                if targets:
                    merges.append(Merge(down, up, stack.base_M_O_I, list(chosen), targets, scales, power_of_two))
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
        base_O_I, module, number = found
        down_M_R_I, up_M_O_R = (self._flat.tensor(self._specs[module + kind]) for kind in (lora.A, lora.B))
        merged_O_I = lora.merge(base_O_I, down_M_R_I.flatten(0, -3)[number], up_M_O_R.flatten(0, -3)[number])
        if name + SCALES not in self._held:
            return merged_O_I
        quantized = quantize_unchecked(merged_O_I, WEIGHT_BLOCK, power_of_two=self._power_of_two)
        self._scales[name + SCALES] = quantized.scales_B_B
        return quantized.values_N_C
