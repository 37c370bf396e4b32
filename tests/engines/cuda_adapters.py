"""Adapters merged by one launch for all layers, in the base's number format and into FP8."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Merge
from asyncrl.precision.quantizer import SIDE, WEIGHT_BLOCK, Quantized, dequantize
from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import layout
from tests.support.cuda_places import Place, both, close

LAYERS, CHOSEN = 4, (0, 3, 1)
"""Of the layers some, in any order."""


class Case(NamedTuple):
    outputs: int
    inputs: int
    rank: int
    dtype: torch.dtype = torch.float32
    first_row: int = 0
    """Of the target within a fused matrix."""


def _cases(place: Place) -> list[Case]:
    if not place.large:
        return [Case(136, 200, 3), Case(128, 128, 16, first_row=5), Case(40, 24, 70)]
    return [
        *(Case(4096, 4096, rank, torch.bfloat16) for rank in (8, 16, 64, 100)),
        Case(1024, 4096, 32, torch.bfloat16, first_row=4096),
        Case(12_288, 4096, 16, torch.bfloat16),
        Case(136, 200, 3, torch.bfloat16, first_row=1),
        Case(136, 201, 16),
    ]


def merge_adapters(place: Place) -> None:
    for case in _cases(place):
        base_L_O_I = place.normal(LAYERS, case.outputs, case.inputs, dtype=case.dtype)
        down_L_R_I = place.normal(LAYERS, case.rank, case.inputs)
        up_L_O_R = 0.1 * place.normal(LAYERS, case.outputs, case.rank)
        named = [("down", down_L_R_I), ("up", up_L_O_R)]
        specs, total = layout(named)
        flat = Flat.empty(specs, total, place.device)
        for spec, (_, tensor) in zip(specs, named, strict=True):
            flat.put(spec, tensor)
        rows = slice(case.first_row, case.first_row + case.outputs)

        def plain(
            kernels: Kernels, case: Case = case, base: Tensor = base_L_O_I, flat: Flat = flat, rows: slice = rows
        ) -> Tensor:
            fused = torch.full((LAYERS, rows.stop + 2, case.inputs), 7.0, dtype=case.dtype, device=place.device)
            merge = Merge(flat.specs[0], flat.specs[1], base, CHOSEN, [fused[layer, rows] for layer in CHOSEN])
            run = kernels.merger([merge])
            assert bool((fused == 7.0).all()), "not yet"
            run(flat)
            return fused

        found, expected = both(plain)
        assert bool((found[2] == 7.0).all())
        assert bool((found[:, rows.stop :] == 7.0).all())
        assert bool((found[:, : rows.start] == 7.0).all())
        close(found, expected)
        product_O_I = up_L_O_R[3].double() @ down_L_R_I[3].double()
        exact = (base_L_O_I[3].double() + product_O_I)[: case.outputs]
        close(found[3, rows].double(), exact, 0.1 if case.dtype == torch.bfloat16 else 1e-4)
        for power_of_two in (False, True):
            _in_fp8(place, case, base_L_O_I, flat, power_of_two=power_of_two)


def _in_fp8(place: Place, case: Case, base_L_O_I: Tensor, flat: Flat, *, power_of_two: bool) -> None:
    """A last bit of the sum may turn the rounding of a number, so what they stand for is compared."""
    blocks = -(-case.outputs // SIDE), -(-case.inputs // SIDE)

    def run(kernels: Kernels) -> tuple[Tensor, Tensor]:
        values = torch.zeros(LAYERS, case.outputs, case.inputs, dtype=torch.uint8, device=place.device)
        scales = torch.zeros(LAYERS, *blocks, device=place.device)
        targets = [values[layer].view(torch.float8_e4m3fn) for layer in CHOSEN]
        into = [scales[layer] for layer in CHOSEN]
        kernels.merger([Merge(flat.specs[0], flat.specs[1], base_L_O_I, CHOSEN, targets, into, power_of_two)])(flat)
        return values, scales

    (values, scales), (other_values, other_scales) = both(run)
    close(scales, other_scales, 0.01)
    assert not values[2].any()
    for layer in CHOSEN:
        found, expected = (
            dequantize(Quantized(each[layer].view(torch.float8_e4m3fn), of[layer], WEIGHT_BLOCK))
            for each, of in ((values, scales), (other_values, other_scales))
        )
        assert float((found - expected).norm() / expected.norm()) < 0.01
