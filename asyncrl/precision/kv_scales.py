"""Scales of an FP8 KV cache: one number for the queries, one for the keys and one for the values of each layer.

    scale = 1.05 * amax / 448           amax: the 99.9th percentile over tokens of max|x| after RoPE

Scales belong to a version of the weights: with the next one keys grow or shrink. The trainer finds them over the tokens
of its last batch, computed anew with the new weights, and they travel with these. Where none come along, as before the
first publication, an engine finds its own over fixed prompts. Either way each engine compares the scales it was given
with what it measures itself, because a scale that is too small cuts keys off without any error.

Axis suffixes: L layers, X queries, keys and values, T tokens.
"""

from collections.abc import Callable, Sequence
from math import ceil, inf, log2
from typing import cast

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.models.layers import Attend
from asyncrl.models.packed import packed_attention
from asyncrl.precision.quantizer import LARGEST

MARGIN = 1.05
PERCENTILE = 0.999
PROMPTS, LENGTH = 8, 48
CHECK_LENGTH = 16
"""Enough of each fixed prompt to tell stale scales on a GPU, where each token adds to a pause. Of SmolLM2, scales found
so are 0.92 of those on 4,096 tokens in the median and 0.71 at least; with whole prompts it is 0.96 and 0.76."""
TRAINED_IDS = 1024
BEYOND, BELOW = 4.0, 1 / 512
"""Range of needed scale / given scale that is believed. It is wide, as fixed prompts differ from training. Too small
a scale cuts numbers off; one that is too large costs little until many fall among E4M3's subnormal numbers, which begin
at 1/28672 of its range."""
ROOM = 4.0
LayerScales = tuple[float, float, float]
"""Of queries, keys and values."""
KINDS = ("queries", "keys", "values")
Forward = Callable[[Tensor, Tensor, Attend], object]
"""(tokens_T, positions_T, attend): a whole decoder."""


class Watcher:
    """Attention that takes down max|x| of each token's queries, keys and values on their way."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.largest: dict[int, Tensor] = {}
        """By layer: of queries, keys and values, one number per token."""

    def __call__(self, layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        self.largest[layer] = torch.stack([x.flatten(1).abs().amax(1).float() for x in (q_T_H_D, k_T_K_D, v_T_K_D)])
        return self._attend(layer, q_T_H_D, k_T_K_D, v_T_K_D)


def measure(
    forward: Forward, samples: Sequence[Sequence[int]], device: torch.device | str = "cpu", *, narrow: bool = False
) -> tuple[LayerScales, ...]:
    """The scales that these samples ask for; `narrow` computes as a trainer in bf16 does, much faster on a GPU."""
    return scales_of(largest(forward, samples, device, narrow=narrow))


@torch.no_grad()
def largest(
    forward: Forward, samples: Sequence[Sequence[int]], device: torch.device | str = "cpu", *, narrow: bool = False
) -> Tensor:
    """The same without a wait for a GPU: max|x| of each token, by layers and queries, keys and values."""
    device, lengths = torch.device(device), [len(sample) for sample in samples]
    watcher = Watcher(packed_attention(lengths, device, narrow=narrow))
    tokens_2_T = np.concatenate([np.stack([sample, np.arange(len(sample))], dtype=np.int64) for sample in samples], 1)
    tokens_T, positions_T = torch.from_numpy(tokens_2_T).to(device, non_blocking=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
        forward(tokens_T, positions_T, watcher)
    return torch.stack([watcher.largest[layer] for layer in sorted(watcher.largest)])


def scales_of(largest_L_X_T: Tensor) -> tuple[LayerScales, ...]:
    """From max|x| of each token by layer, of queries, keys and values, or of the last two.

    All at once, because a GPU is waited for once then, and not for each of some hundred numbers.
    """
    found_L_X = torch.quantile(largest_L_X_T.float(), PERCENTILE, dim=-1) * (MARGIN / LARGEST)
    unseen = (1.0,) * (len(KINDS) - found_L_X.shape[1])
    return tuple(cast(LayerScales, (*unseen, *(scale or 1.0 for scale in layer))) for layer in found_L_X.tolist())


def fixed_samples(vocabulary: int) -> list[list[int]]:
    """What an engine measures on: the same tokens in every process, among the frequent ones."""
    return np.random.default_rng(1).integers(0, min(vocabulary, TRAINED_IDS), (PROMPTS, LENGTH)).tolist()


def settled(used: Sequence[LayerScales], needed: Sequence[LayerScales]) -> tuple[LayerScales, ...]:
    """For an engine to which a new scale is expensive: those in use stay while they fit, new ones have room to grow.

    A scale fits that is at least what is needed and at most `ROOM` times as large; E4M3 has its own exponents, so that
    a scale somewhat too large costs no precision. New ones are rounded up to powers of two.
    """
    pairs = (zip(old, new, strict=True) for old, new in zip(used, needed, strict=True))
    return tuple(cast(LayerScales, tuple(_settled(old, new) for old, new in layer)) for layer in pairs)


def _settled(old: float, new: float) -> float:
    if not 0 < new < inf:
        raise WeightSyncError(
            f"a scale of {new} for queries, keys or values cannot be: training has diverged; go back to a checkpoint "
            "before it and lower trainer.lr"
        )
    return old if new <= old <= ROOM * new else 2.0 ** ceil(log2(new))


def check_scales(given: Sequence[LayerScales], measured: Sequence[LayerScales], who: str) -> None:
    """Refuse scales that cannot be those of these weights."""
    if len(given) != len(measured):
        raise WeightSyncError(f"{who}: KV scales for {len(given)} layers, and the model has {len(measured)}")
    for layer, pair in enumerate(zip(given, measured, strict=True)):
        for kind, scale, own in zip(KINDS, *pair, strict=True):
            if not BELOW <= own / scale <= BEYOND:
                raise WeightSyncError(
                    f"{who}: the scale of {kind} in layer {layer} is {scale:.3g}, and these weights need about "
                    f"{own:.3g}: stale scales; publish again, or use rollout.kv_scales=engine"
                )
