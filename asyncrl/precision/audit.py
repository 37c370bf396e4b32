"""After each weight sync: do both sides quantize the same tensors, and does the engine multiply with the new scales?

A digest proves that weights arrived. It says nothing about the FP8 numbers made of them, and a stale scale gives wrong
text without an error. So a fixed input is multiplied with the matrices of one layer, another one for each version, as
the engine holds them, and with those that the published weights should become.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.precision.layers import PROJECTION
from asyncrl.precision.quantizer import ACTIVATION_BLOCK, WEIGHT_BLOCK, quantize, reference_product, rounded

TOLERANCE = 0.01
"""Relative; the two differ by the order of their sums only."""
ROWS = 4


def check_layers(meant: Iterable[str], held: Iterable[str], who: str) -> None:
    """The names that the trainer means to be quantized, and those that the engine quantizes."""
    if differing := sorted(set(meant) ^ set(held)):
        raise WeightSyncError(
            f"{who}: trainer and engine do not quantize the same layers, differing in {', '.join(differing[:5])}; "
            "start both with the same rollout.precision and rollout.fp8"
        )


def check_products(
    published: Iterable[tuple[str, Tensor]], held: Mapping[str, Tensor], layer: int, who: str, *, power_of_two: bool
) -> None:
    """`held` are the quantized matrices as the engine multiplies with them, under their Hugging Face names."""
    for name, weight_O_I in published:
        found = PROJECTION.fullmatch(name)
        if name not in held or found is None or int(found[1]) != layer:
            continue
        x_N_I = fixed_input(weight_O_I.shape[1])
        weight = quantize(weight_O_I, WEIGHT_BLOCK, power_of_two=power_of_two)
        expected_N_O = reference_product(quantize(x_N_I, ACTIVATION_BLOCK, power_of_two=power_of_two), weight)
        found_N_O = rounded(x_N_I, power_of_two=power_of_two) @ held[name].float().t()
        check_gap(name, float(relative_gap(found_N_O, expected_N_O)), who)


def fixed_input(inputs: int) -> Tensor:
    return torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(0))


def relative_gap(found_N_O: Tensor, expected_N_O: Tensor) -> Tensor:
    return (found_N_O - expected_N_O).norm() / expected_N_O.norm().clamp(min=1e-30)


def check_gap(name: str, gap: float, who: str, allowed: float = TOLERANCE) -> None:
    if not gap <= allowed:
        raise WeightSyncError(
            f"{who}: a product with {name} in FP8 is off by {100 * gap:.3g} % of what the published weights give, "
            f"allowed is {100 * allowed:g} %: stale scales or values; publish again"
        )
