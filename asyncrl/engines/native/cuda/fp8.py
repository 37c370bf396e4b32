"""What an FP8 engine on a GPU checks before a version counts, and how the version gets in.

All of it without touching what is served, but for one layer: its tensors are loaded first, as the others will be, and
multiplied with a fixed input by the very kernel that decodes. If that is not what the published numbers give, the layer
is put back, and the engine goes on as it was. KV scales are measured with the published weights, layer by layer, before
anything is loaded.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Kv, Queries
from asyncrl.engines.native.cuda.model import Block, CudaModel
from asyncrl.engines.native.cuda.pages import PAGE
from asyncrl.engines.native.cuda.weights_fp8 import Fp8Weights
from asyncrl.engines.native.published import Receiver, not_in_fp8
from asyncrl.engines.settings import NativeEngine as Settings
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import hf_tensors
from asyncrl.precision.audit import check_gap, check_layers, fixed_input
from asyncrl.precision.kv_scales import LayerScales, check_scales, fixed_samples, scales_of
from asyncrl.precision.layers import KV_CACHE, SCALES
from asyncrl.precision.quantizer import ACTIVATION_BLOCK, WEIGHT_BLOCK, Quantized, quantize, reference_product
from asyncrl.precision.settings import NO_QK_NORM, Numerics
from asyncrl.types import WeightManifest
from asyncrl.weights.transport import published

_TILE = 16
_OLDEST = (8, 9)
Load = Callable[[Iterable[str]], None]
"""Published tensors of these names into those held."""


class Fp8Serving:
    def __init__(self, model: CudaModel, weights: Fp8Weights, numerics: Numerics, length: int) -> None:
        self._model, self._weights, self._numerics = model, weights, numerics
        self._samples = [sample[:length] for sample in fixed_samples(model.embedding_V_E.shape[0])]

    def own_scales(self) -> tuple[LayerScales, ...]:
        """For the weights that are held."""
        model = self._model
        return self._measure(model.embedding_V_E, zip(model.input_norms, model.blocks, strict=True))

    @property
    def quantized(self) -> list[str]:
        return [*self._weights.quantized, *([KV_CACHE] if self._numerics.kv else [])]

    @torch.inference_mode()
    def kv_scales(self, manifest: WeightManifest, receiver: Receiver) -> tuple[LayerScales, ...]:
        """Of a version, if they can be right; () where pages are not in FP8."""
        who, meant = _who(manifest, receiver), manifest.fp8
        if meant is None or not self._numerics.kv:
            return ()
        own = self._published_scales(manifest)
        if not meant.kv_scales:
            return own
        # Queries are not quantized here: there is nothing to compare theirs with.
        own = tuple((given[0], *scales[1:]) for given, scales in zip(meant.kv_scales, own, strict=False))
        check_scales(meant.kv_scales, own, who)
        return meant.kv_scales

    def probe(self, manifest: WeightManifest, receiver: Receiver, load: Load) -> None:
        """Load one layer, another one for each version, and multiply with it."""
        weights, fp8 = self._weights, self._numerics.fp8
        layer = fp8.keep_first + manifest.version % max(1, len(self._model.blocks) - fp8.keep_first - fp8.keep_last)
        names = weights.names(layer)
        old = {name: weights.held[name].clone() for name in names}
        load(names)
        try:
            self._check_products(manifest, layer, _who(manifest, receiver))
        except WeightSyncError:
            for name, tensor in old.items():
                weights.held[name].copy_(tensor)
            raise

    def _check_products(self, manifest: WeightManifest, layer: int, who: str) -> None:
        device = self._model.embedding_V_E.device
        find = _finder(manifest, device)
        for name, matrix in self._weights.of_layer(layer).items():
            parts = self._weights.parts[f"layers.{layer}.{name}"]
            x_N_I = fixed_input(matrix.values_O_I.shape[1]).to(device)
            found_N_O = self._model.product_gauge(x_N_I, matrix)
            codes = quantize(x_N_I, ACTIVATION_BLOCK, power_of_two=self._numerics.fp8.power_of_two)
            for part, found in zip(parts, found_N_O.split([part.rows for part in parts], 1), strict=True):
                values, scales = find(part.name), find(part.name + SCALES)
                check_gap(part.name, found, reference_product(codes, Quantized(values, scales, WEIGHT_BLOCK)), who)

    def _published_scales(self, manifest: WeightManifest) -> tuple[LayerScales, ...]:
        dtype, find = self._model.embedding_V_E.dtype, _finder(manifest, self._model.embedding_V_E.device)

        def layers() -> Iterable[tuple[Tensor, Block]]:
            for layer in range(len(self._model.blocks)):
                named = self._weights.fused(layer, find, dtype)
                norm_E = named["input_norm"]
                assert isinstance(norm_E, Tensor)
                yield norm_E, Block.of(named)

        return self._measure(find("model.embed_tokens.weight").to(dtype), layers())

    def _measure(self, embedding_V_E: Tensor, layers: Iterable[tuple[Tensor, Block]]) -> tuple[LayerScales, ...]:
        """Keys and values of fixed prompts; one layer's pages serve all layers."""
        model, device = self._model, embedding_V_E.device
        queries, tokens_T = _tiles(self._samples, device)
        kv = Kv(model.new_pages(len(self._samples), PAGE, 1)[0])
        x_T_E, found = embedding_V_E[tokens_T], list[Tensor]()
        for norm_E, block in layers:
            x_T_E = model.layer(norm_E, block, x_T_E, [queries], [queries], kv)
            stored_2_X_K_S_D = kv.pages_2_X_K_S_D[:, :, :, : len(self._samples[0])]
            found.append(stored_2_X_K_S_D.abs().amax((2, 4)).flatten(1))
        return scales_of(torch.stack(found))


def agree(serving: Fp8Serving | None, manifest: WeightManifest, receiver: Receiver) -> None:
    """That a version is meant to be quantized as this engine does it, if at all."""
    if serving is None and manifest.fp8 is None:
        return
    if serving is None:
        raise WeightSyncError(not_in_fp8(receiver.engine, manifest.version))
    if manifest.fp8 is None:
        raise WeightSyncError(
            f"{_who(manifest, receiver)}: it is not meant for FP8, and an engine on a GPU cannot leave FP8 while it "
            "runs; start both with the same rollout.precision, and use sentinel.on_fp8=restart or stop"
        )
    check_layers(manifest.fp8.quantized, serving.quantized, _who(manifest, receiver))


def _finder(manifest: WeightManifest, device: torch.device) -> Callable[[str], Tensor]:
    """Published tensors by name. A view is made when it is asked for, as Python takes long to make all of them."""
    flat, specs = published(manifest), {spec.name: spec for spec in manifest.tensors}
    return lambda name: flat.tensor(specs[name]).to(device)


def _who(manifest: WeightManifest, receiver: Receiver) -> str:
    return f"engine {receiver.engine}, version {manifest.version}"


def serve(
    model: Decoder, settings: Settings, kernels: Kernels, numerics: Numerics | None
) -> tuple[CudaModel, dict[str, Tensor], Fp8Serving | None]:
    """What decodes, its tensors by published names, and what there is to FP8."""
    config, length = model.config, settings.max_length
    if numerics is None:
        return CudaModel(model, length, kernels), dict(hf_tensors(model)), None
    if numerics.kv and not config.qk_norm and not numerics.fp8.allow_kv_without_qk_norm:
        raise EngineError(NO_QK_NORM)
    if model.norm.is_cuda and torch.cuda.get_device_capability(model.norm.device) < _OLDEST:
        raise EngineError(
            f"rollout.precision: this GPU has no FP8, which needs compute capability {_OLDEST[0]}.{_OLDEST[1]} (Ada, "
            "Hopper or newer); use rollout.precision=bf16"
        )
    weights = Fp8Weights(model, numerics)
    if model.norm.is_cuda:
        from asyncrl.engines.native.cuda.kernels.fp8_product import prepare  # Triton comes with torch for GPUs only

        torch.cuda.empty_cache()  # what was quantized makes room for pages
        prepare(weights.matrices.values())
    in_fp8 = [weights.of_layer(layer) for layer in range(config.layers)]
    serving = CudaModel(model, length, kernels, in_fp8, power_of_two=numerics.fp8.power_of_two)
    return serving, weights.held, Fp8Serving(serving, weights, numerics, length)


def _tiles(samples: Sequence[Sequence[int]], device: torch.device) -> tuple[Queries, Tensor]:
    """All samples as tiles of a row each, which has one page; they are of one length, and no longer than a page."""
    length = len(samples[0])
    starts = list(range(0, length, _TILE))
    row_G, start_G = ([r for r in range(len(samples)) for _ in starts], starts * len(samples))
    count_G = [min(_TILE, length - start) for start in start_G]
    tokens = torch.zeros(len(row_G), _TILE, dtype=torch.int64)
    for group, (row, start, count) in enumerate(zip(row_G, start_G, count_G, strict=True)):
        tokens[group, :count] = torch.tensor(samples[row][start : start + count])
    groups_3_G = torch.tensor([row_G, start_G, count_G], dtype=torch.int32, device=device)
    table_N_P = torch.arange(len(samples), dtype=torch.int32, device=device)[:, None]
    queries = Queries(_TILE, groups_3_G[0], groups_3_G[1], groups_3_G[2], table_N_P)
    return queries, tokens.flatten().to(device)
