"""FP8 in what the trainer publishes: weights that leave it quantized, which tensors these are, and KV-cache scales."""

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from asyncrl.config import Run
from asyncrl.config.precision import Fp8, numerics
from asyncrl.config.weights import published_adapters
from asyncrl.models.config import ModelConfig
from asyncrl.models.policy import PolicyModel
from asyncrl.precision.kv_scales import largest, scales_of
from asyncrl.precision.layers import KV_CACHE, SCALES, is_quantized
from asyncrl.precision.quantizer import E4M3, SIDE, WEIGHT_BLOCK, check_finite, quantize_unchecked
from asyncrl.types import Fp8Version, Ints, TensorSpec
from asyncrl.weights.gather import Source
from asyncrl.weights.manifest import layout

TOKENS = 1024
"""Tokens that scales are found on: the 99.9th percentile needs about as many, and more cost time in every version. Of
SmolLM2, 99 % of the scales found on so many are at least 0.84 of those found on 35,000 (on 4,096: 0.86)."""


class Fp8Source:
    """Weights that leave the trainer in FP8: quantized on the fly, tensor by tensor, each with its scales behind it.

    It wraps any source of publications, so that shards, transports, digests and deltas need not know. What cannot be
    quantized is found once all of it is gathered, before the last of it is sent: to look at each tensor would stop the
    trainer for each, and beside an engine on the same GPU that is some milliseconds every time.
    """

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


class Fp8Publication:
    """Keeps the last completions trained on: each new version computes from them the scales of keys and values."""

    def __init__(self, run: Run, model: ModelConfig) -> None:
        self._numerics = numerics(run.rollout.precision, run.rollout.fp8)
        self._narrow = run.trainer.dtype == "bf16"
        self._layers = model.layers
        in_blocks = self._numerics is not None and self._numerics.weights and run.engine.travels_in_fp8
        self.quantizes = in_blocks and not published_adapters(run)
        """Whether the trainer does; else the engines, also of what they merge adapters into."""
        self._finds_scales = self._numerics is not None and self._numerics.kv and run.rollout.kv_scales == "trainer"
        self._names: tuple[str, ...] = ()
        self._seen: deque[list[int]] = deque()
        self._tokens = 0

    def travelling(self, inner: Source) -> Source:
        """Where publications come from, if the weights travel in FP8."""
        found = self._numerics
        return inner if found is None or not self.quantizes else Fp8Source(inner, self._layers, found.fp8)

    def see(self, samples: Iterable[Ints]) -> None:
        """What was trained on: prompts with their completions."""
        if not self._finds_scales:
            return
        for tokens in samples:
            self._seen.append(tokens.tolist())
            self._tokens += len(tokens)
            while self._tokens > TOKENS and len(self._seen) > 1:
                self._tokens -= len(self._seen.popleft())

    def of(self, model: PolicyModel) -> Callable[[], Fp8Version | None]:
        """`model` as the trainer computes with it. Ask for the result last: a GPU finds scales while weights go out."""
        if self._numerics is None:
            return lambda: None
        names = self._names = self._names or self._quantized(model)
        if not self._finds_scales or not self._seen:
            return lambda: Fp8Version(names, ())
        largest_L_X_T = largest(model, self._seen, model.device, narrow=self._narrow)
        return lambda: Fp8Version(names, scales_of(largest_L_X_T))

    def _quantized(self, model: PolicyModel) -> tuple[str, ...]:
        assert self._numerics is not None
        fp8, names = self._numerics.fp8, list[str]()
        if self._numerics.weights:
            names = [
                part.name
                for _, parts in model.parts()
                for part in parts
                if is_quantized(part.name, self._layers, keep_first=fp8.keep_first, keep_last=fp8.keep_last)
            ]
        return (*names, *([KV_CACHE] if self._numerics.kv else []))
