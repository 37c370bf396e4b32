"""What weights and KV cache take in each precision on hardware that has it, by arithmetic alone; torch not imported."""

from math import ceil
from typing import NamedTuple

from asyncrl.config.precision import PRECISIONS, SIDE, Fp8, Precision, numerics
from asyncrl.models.config import ModelConfig

FLOAT, BF16, FP8 = 4, 2, 1


class Footprint(NamedTuple):
    precision: Precision
    weights: int
    """Bytes, scales included."""
    kv_token: int
    """Bytes of the keys and values of one token."""

    def tokens(self, memory: int) -> int:
        """KV tokens in what the weights leave of so many bytes."""
        return max(0, memory - self.weights) // self.kv_token


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
        layers = max(0, model.layers - fp8.keep_first - fp8.keep_last)
        weights -= layers * sum(_saved(*shape) for shape in _projections(model))
    return Footprint(precision, weights, kv_numbers * (FP8 if found.kv else BF16))


def _saved(outputs: int, inputs: int) -> int:
    return outputs * inputs * (BF16 - FP8) - ceil(outputs / SIDE) * ceil(inputs / SIDE) * FLOAT


def _projections(model: ModelConfig) -> list[tuple[int, int]]:
    hidden, wide = model.hidden_size, model.intermediate_size
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return [
        (query, hidden),
        (key, hidden),
        (key, hidden),
        (hidden, query),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    ]
