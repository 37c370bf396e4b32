"""What the trainer says about FP8 with each version: which tensors are quantized, and the scales of the KV cache."""

from collections import deque
from collections.abc import Callable, Iterable

from asyncrl.config import Run
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import hf_parts
from asyncrl.precision.kv_scales import largest, scales_of
from asyncrl.precision.layers import KV_CACHE, is_quantized
from asyncrl.precision.settings import numerics, travels_in_fp8
from asyncrl.precision.source import Fp8Source
from asyncrl.types import Fp8Version, Ints
from asyncrl.weights.gather import Source

TOKENS = 1024
"""Tokens that scales are found on: the 99.9th percentile needs about as many, and more cost time in every version. Of
SmolLM2, 99 % of the scales found on so many are at least 0.84 of those found on 35,000 (on 4,096: 0.86)."""


class Fp8Publication:
    """Keeps the last answers trained on, to find with the new weights what their keys and values need."""

    def __init__(self, run: Run, model: ModelConfig) -> None:
        self._numerics = numerics(run.rollout.precision, run.rollout.fp8)
        self._narrow = run.trainer.dtype == "bf16"
        self._layers = model.layers
        self.quantizes = self._numerics is not None and self._numerics.weights and travels_in_fp8(run.engine)
        """Whether the trainer does; else the engines."""
        self._finds_scales = self._numerics is not None and self._numerics.kv and run.rollout.kv_scales == "trainer"
        self._names: tuple[str, ...] = ()
        self._seen: deque[list[int]] = deque()
        self._tokens = 0

    def travelling(self, inner: Source) -> Source:
        """Where publications come from, if the weights travel in FP8."""
        found = self._numerics
        return inner if found is None or not self.quantizes else Fp8Source(inner, self._layers, found.fp8)

    def see(self, samples: Iterable[Ints]) -> None:
        """What was trained on: prompts with their answers."""
        if not self._finds_scales:
            return
        for tokens in samples:
            self._seen.append(tokens.tolist())
            self._tokens += len(tokens)
            while self._tokens > TOKENS and len(self._seen) > 1:
                self._tokens -= len(self._seen.popleft())

    def of(self, model: Decoder) -> Callable[[], Fp8Version | None]:
        """`model` as the trainer computes with it. Ask for the result last: a GPU finds scales while weights go out."""
        if self._numerics is None:
            return lambda: None
        names = self._names = self._names or self._quantized(model)
        if not self._finds_scales or not self._seen:
            return lambda: Fp8Version(names, ())
        largest_L_X_T = largest(model, self._seen, model.norm.device, narrow=self._narrow)
        return lambda: Fp8Version(names, scales_of(largest_L_X_T))

    def _quantized(self, model: Decoder) -> tuple[str, ...]:
        assert self._numerics is not None
        fp8, names = self._numerics.fp8, list[str]()
        if self._numerics.weights:
            names = [
                part.name
                for _, parts in hf_parts(model)
                for part in parts
                if is_quantized(part.name, self._layers, keep_first=fp8.keep_first, keep_last=fp8.keep_last)
            ]
        return (*names, *([KV_CACHE] if self._numerics.kv else []))
