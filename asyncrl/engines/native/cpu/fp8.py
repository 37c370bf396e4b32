"""FP8 rollouts on a CPU: the numbers are those of FP8, the arithmetic is not.

Weights are quantized and dequantized once per version, activations before each projection, and queries, keys and values
before they are stored and compared. The rest runs in floats: it shows what FP8 does to learning, at the speed and
in the memory of floats. The ordinary policy and cache do not know of it.

Weights come as the trainer publishes them, and are quantized here as they are loaded. The manifest says whether its
version is in FP8 at all: a run that falls back publishes without, and this engine then computes as the ordinary one.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.precision import NO_QK_NORM, Fp8, Numerics
from asyncrl.engines.native.cpu.cache import KvCache, Layout
from asyncrl.engines.native.cpu.decoding import Policy
from asyncrl.engines.native.cpu.layout import interleave
from asyncrl.engines.native.weight_loading import Receiver, read_whole
from asyncrl.errors import AsyncRLError, EngineError
from asyncrl.models.decoder import Decoder, LayerTensors, Tensors, add_projection
from asyncrl.models.experts import ExpertTensors, Route
from asyncrl.models.layers import Attend, NormScale, Rotate, rms_norm, tabled_rotation
from asyncrl.models.names import hf_tensors
from asyncrl.precision.audit import check_layers, check_products
from asyncrl.precision.kv_scales import LayerScales, check_scales, fixed_samples, measure
from asyncrl.precision.layers import KV_CACHE, is_quantized
from asyncrl.precision.quantizer import WEIGHT_BLOCK, dequantize, quantize, rounded, saturated
from asyncrl.types import Fp8Version, WeightManifest


def quantized_weight(name: str, weight_O_I: Tensor, fp8: Fp8) -> Tensor:
    """What the engine multiplies with instead."""
    return dequantize(quantize(weight_O_I, WEIGHT_BLOCK, name=name, power_of_two=fp8.power_of_two))


class Fp8Policy(Policy):
    def __init__(
        self, path: Path, dtype: torch.dtype, positions: int, numerics: Numerics, *, keep_output: bool = False
    ) -> None:
        self._numerics = numerics
        self._meant: Fp8Version | None = Fp8Version()
        """Of the version that is served; None: it is not in FP8."""
        self._manifest: WeightManifest | None = None
        self._who = str(path)
        self.kv_scales: tuple[LayerScales, ...] = ()
        super().__init__(path, dtype, positions, keep_output=keep_output)
        if numerics.kv and not self.config.qk_norm and not numerics.fp8.allow_kv_without_qk_norm:
            raise EngineError(f"{path}: {NO_QK_NORM}")

    def load(self, manifest: WeightManifest, receiver: Receiver) -> str:
        """All of it, or the version before stays as it was: a probe that fails must leave nothing behind."""
        held = dict(hf_tensors(self.model))
        values, state = {name: tensor.clone() for name, tensor in held.items()}, dict(vars(self))
        self._meant, self._manifest = manifest.fp8, manifest
        self._who = f"engine {receiver.engine}, version {manifest.version}"
        try:
            return self._take(manifest, receiver)
        except AsyncRLError:
            for name, tensor in held.items():
                tensor.copy_(values[name])
            vars(self).update(state)
            raise

    def _derive(self) -> None:
        super()._derive()
        self.kv_scales = self._find_kv_scales()

    @torch.no_grad()
    def _lay_out(self) -> tuple[Tensors, Tensor]:
        if self._meant is None or not self._numerics.weights:
            self._audit({})
            return super()._lay_out()
        self._audit(self._quantize())
        return rounding_tensors(self.model, self._positions, self._numerics.fp8)

    def _quantize(self) -> dict[str, Tensor]:
        """In place; returns the matrices that it concerns."""
        fp8, found = self._numerics.fp8, dict[str, Tensor]()
        for name, tensor in hf_tensors(self.model):
            if is_quantized(name, self.config.layers, keep_first=fp8.keep_first, keep_last=fp8.keep_last):
                found[name] = tensor.copy_(quantized_weight(name, tensor, fp8))
        return found

    def _audit(self, held: dict[str, Tensor]) -> None:
        manifest = self._manifest
        if manifest is None:
            return  # loaded from the checkpoint: there is nobody to agree with yet
        if manifest.fp8 is not None:
            check_layers(manifest.fp8.quantized, [*held, *([KV_CACHE] if self._numerics.kv else [])], self._who)
        fp8 = self._numerics.fp8
        layer = fp8.keep_first + manifest.version % max(1, self.config.layers - fp8.keep_first - fp8.keep_last)
        check_products(read_whole(manifest, self._path), held, layer, self._who, power_of_two=fp8.power_of_two)

    def _find_kv_scales(self) -> tuple[LayerScales, ...]:
        if self._meant is None or not self._numerics.kv:
            return ()
        own = measure(self.tensors.forward, fixed_samples(self.config.vocabulary))
        if not self._meant.kv_scales:
            return own
        check_scales(self._meant.kv_scales, own, self._who)
        return self._meant.kv_scales


class RoundingLayer(NamedTuple):
    """A layer whose projections read FP8."""

    tensors: LayerTensors
    power_of_two: bool

    def forward(self, x_T_E: Tensor, rotate: Rotate, layer: int, attend: Attend, route: Route | None = None) -> Tensor:
        own = self.tensors
        y_T_X = attend(layer, *own.heads_of(self._round(rms_norm(x_T_E, own.input_norm)), rotate))
        x_T_E = add_projection(x_T_E[: len(y_T_X)], self._round(y_T_X), own.out, own.out_bias)
        normed_T_E = rms_norm(x_T_E, own.mlp_norm)
        if isinstance(own.mlp, ExpertTensors):
            return x_T_E + own.mlp.forward(normed_T_E, layer, route, self._round)
        return own.mlp.add_down(x_T_E, self._round(own.mlp.gated(self._round(normed_T_E))))

    def _round(self, x_T_X: Tensor) -> Tensor:
        return rounded(x_T_X, power_of_two=self.power_of_two)


def rounding_tensors(model: Decoder, max_length: int, fp8: Fp8) -> tuple[Tensors, Tensor]:
    """As `decoding_tensors`, but norms stay apart from matrices: what is quantized are their results."""
    layers = [interleave(layer.tensors()) for layer in model.blocks()]
    last = len(layers) - fp8.keep_last
    forwards = [
        RoundingLayer(layer, fp8.power_of_two).forward if fp8.keep_first <= index < last else layer.forward
        for index, layer in enumerate(layers)
    ]
    norm = NormScale.of(model.norm, model.config.norm_eps)
    rotation = tabled_rotation(model.frequencies_D, max_length)
    return Tensors(model.embed_tokens.weight, rotation, forwards, norm), model.output_matrix.t().contiguous()


class Fp8KvCache(KvCache):
    """Holds what FP8 would give back, so that old keys keep the scale that they were stored with."""

    def __init__(self, policy: Fp8Policy, max_rows: int, max_length: int, dtype: torch.dtype) -> None:
        super().__init__(policy.config, max_rows, max_length, dtype)
        self._policy = policy

    def attend(self, layout: Layout) -> Attend:
        store, scales = super().attend(layout), self._policy.kv_scales
        if not scales:
            return store

        def attend(layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
            q_scale, k_scale, v_scale = scales[layer]
            return store(layer, saturated(q_T_H_D, q_scale), saturated(k_T_K_D, k_scale), saturated(v_T_K_D, v_scale))

        return attend
