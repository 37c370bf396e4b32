"""What weights and KV cache take in each precision on hardware that has it, by arithmetic alone; torch not imported."""

from math import ceil
from typing import NamedTuple

from asyncrl.config.engine import KeptBase
from asyncrl.config.precision import PRECISIONS, SIDE, Fp8, Precision, numerics
from asyncrl.config.trainer import Lora
from asyncrl.models.config import ATTENTION, GATED, ModelConfig, matrices

FLOAT, BF16, FP8 = 4, 2, 1


class Footprint(NamedTuple):
    precision: Precision
    weights: int
    """Bytes, scales included."""
    kv_token: int
    """Bytes of the keys and values of one token."""
    base: int = 0
    """Bytes of what an engine merges adapters into."""

    def tokens(self, memory: int) -> int:
        """KV tokens in what the weights leave of so many bytes."""
        return max(0, memory - self.weights - self.base) // self.kv_token


def footprints(model: ModelConfig, parameters: int, fp8: Fp8) -> list[Footprint]:
    """One for each precision."""
    return [footprint(model, parameters, precision, fp8) for precision in PRECISIONS]


def footprint(model: ModelConfig, parameters: int, precision: Precision, fp8: Fp8) -> Footprint:
    found, item = numerics(precision, fp8), FLOAT if precision == "fp32" else BF16
    kv_numbers = 2 * model.layers * model.kv_heads * model.head_dim
    if found is None:
        return Footprint(precision, parameters * item, kv_numbers * item)
    weights = parameters * BF16
    if found.weights:
        for layer in range(fp8.keep_first, model.layers - fp8.keep_last):
            weights -= sum(_saved(*shape) for shape in matrices(model, layer, ATTENTION + GATED))
    return Footprint(precision, weights, kv_numbers * (FP8 if found.kv else BF16))


def with_base(found: Footprint, model: ModelConfig, parameters: int, kept: KeptBase, lora: Lora) -> Footprint:
    """Of an engine that gets adapters alone; the base is in the number format that is not FP8."""
    item = FLOAT if found.precision == "fp32" else BF16
    layers = range(model.layers)
    adapted = sum(out * into for layer in layers for out, into in matrices(model, layer, lora.targets))
    return found._replace(base=item * {"nothing": 0, "adapted": adapted, "everything": parameters}[kept])


def _saved(outputs: int, inputs: int) -> int:
    return outputs * inputs * (BF16 - FP8) - ceil(outputs / SIDE) * ceil(inputs / SIDE) * FLOAT
