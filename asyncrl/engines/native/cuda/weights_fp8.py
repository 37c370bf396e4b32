"""Weights in FP8 as a GPU multiplies with them, in storage that stays where it is.

Every projection of the checkpoint is quantized by itself, and a fused matrix holds the blocks of its projections one
below the other. A published version brings values and scales under two names, and both are views of this storage.

Axis suffixes: O outputs, I inputs, X rows of blocks, B blocks of inputs.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Fp8Matrix
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import Part, cut, hf_parts
from asyncrl.precision.layers import SCALES, is_quantized
from asyncrl.precision.quantizer import SIDE, WEIGHT_BLOCK, quantize
from asyncrl.precision.settings import Numerics


def quantized_matrix(weight_O_I: Tensor, parts: Sequence[Part], *, power_of_two: bool) -> Fp8Matrix:
    found = [
        quantize(part_O_I, WEIGHT_BLOCK, name=name, power_of_two=power_of_two)
        for name, part_O_I in cut(weight_O_I, parts)
    ]
    values_O_I = torch.cat([each.values_N_C.view(torch.uint8) for each in found]).view(torch.float8_e4m3fn)
    scales_X_B = torch.cat([each.scales_B_B for each in found])
    return Fp8Matrix(values_O_I, scales_X_B, *_blocks([part.rows for part in parts], weight_O_I.device))


def _blocks(rows: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
    numbers, first = list[Tensor](), 0
    for count in rows:
        numbers.append(first + torch.arange(count) // SIDE)
        first += -(-count // SIDE)
    return torch.cat(numbers).to(device, torch.int32), all(count % SIDE == 0 for count in rows)


def views(matrix: Fp8Matrix, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Values and scales by the names that they are published under."""
    rows = [part.rows for part in parts]
    heights = [-(-count // SIDE) for count in rows]
    split = zip(parts, matrix.values_O_I.split(rows), matrix.scales_X_B.split(heights), strict=True)
    for part, values_O_I, scales_X_B in split:
        yield part.name, values_O_I
        yield part.name + SCALES, scales_X_B


class Fp8Weights:
    """The parameters of a model, quantized where they should be; what is replaced is freed."""

    def __init__(self, model: Decoder, numerics: Numerics) -> None:
        fp8, layers = numerics.fp8, model.config.layers
        self.parts = dict(hf_parts(model))
        self.matrices: dict[str, Fp8Matrix] = {}
        """By the names of our parameters."""
        self.held: dict[str, Tensor] = {}
        """By published names."""
        for own, parts in self.parts.items():
            parameter = model.get_parameter(own)
            if numerics.weights and all(
                is_quantized(part.name, layers, keep_first=fp8.keep_first, keep_last=fp8.keep_last) for part in parts
            ):
                matrix = quantized_matrix(parameter.detach(), parts, power_of_two=fp8.power_of_two)
                self.matrices[own] = matrix
                self.held.update(views(matrix, parts))
                parameter.data = parameter.new_empty(0)
            else:
                self.held.update(cut(parameter.detach(), parts))

    @property
    def quantized(self) -> list[str]:
        return [part.name for own in self.matrices for part in self.parts[own]]

    def names(self, layer: int) -> list[str]:
        """What is published of a layer."""
        return [name for name in self.held if name.startswith(f"model.layers.{layer}.")]

    def of_layer(self, layer: int) -> dict[str, Fp8Matrix]:
        """By the names of a layer's parameters."""
        begin = f"layers.{layer}."
        return {own.removeprefix(begin): found for own, found in self.matrices.items() if own.startswith(begin)}

    def fused(self, layer: int, find: Callable[[str], Tensor], dtype: torch.dtype) -> dict[str, Tensor | Fp8Matrix]:
        """The parameters of a layer, made of published tensors."""
        begin, found = f"layers.{layer}.", dict[str, Tensor | Fp8Matrix]()
        for own, parts in ((own, parts) for own, parts in self.parts.items() if own.startswith(begin)):
            tensors, name = [find(part.name) for part in parts], own.removeprefix(begin)
            held = self.matrices.get(own)
            if held is not None:
                values_O_I = torch.cat([each.view(torch.uint8) for each in tensors]).view(torch.float8_e4m3fn)
                scales_X_B = torch.cat([find(part.name + SCALES) for part in parts])
                found[name] = held._replace(values_O_I=values_O_I, scales_X_B=scales_X_B)
            else:
                whole = torch.stack(tensors) if parts[0].flat else torch.cat(tensors)
                found[name] = whole.to(dtype)
        return found
