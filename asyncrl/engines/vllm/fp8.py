"""Inside vLLM's worker process: what of its model is in FP8, the scales of its cache, and a product after each update.

vLLM reloads a model layer by layer and makes of the published weights what its kernels multiply with. Where that goes
wrong, text is wrong and nothing raises. So each version is held against what was published: names before anything is
loaded, products of one layer before a token is sampled.

Axis suffixes: N rows, O outputs, I inputs.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from asyncrl.errors import WeightSyncError
from asyncrl.precision.audit import check_gap, check_layers, fixed_input, relative_gap
from asyncrl.precision.kv_scales import LayerScales
from asyncrl.precision.layers import KV_CACHE, PROJECTION, SCALES
from asyncrl.precision.quantizer import E4M3, WEIGHT_BLOCK, Quantized, dequantize
from asyncrl.types import Fp8Version, WeightManifest

ALLOWED = 0.1
"""Relative. Compared is with the input as it is, and FP8 is off by 4 % of that on Gaussian data; kernels differ in how
they round, and a scale that is stale is off by more."""
CAPTURED = "FLASHINFER"
"""Attention that has scales in its captured graphs, where new ones do not reach them."""


def check_names(model: torch.nn.Module, manifest: WeightManifest) -> None:
    """Before anything is loaded: does this engine have in FP8 what the trainer means to be?"""
    if manifest.fp8 is None:
        return
    who, cached = f"version {manifest.version}", [each for each in attentions(model) if _in_fp8(each)]
    names = [name for module in _quantized(model) for name in hf_names(model, module)]
    check_layers(manifest.fp8.quantized, [*names, *([KV_CACHE] if cached else [])], who)
    if not manifest.fp8.kv_scales:
        return
    if len(manifest.fp8.kv_scales) != len(cached):
        raise WeightSyncError(f"{who}: KV scales for {len(manifest.fp8.kv_scales)} layers, and {len(cached)} have any")
    if any(CAPTURED in each.attn_backend.get_name() for each in cached):
        raise WeightSyncError(f"{who}: vLLM chose {CAPTURED}, which takes no new scales; use rollout.kv_scales=engine")


def set_kv_scales(model: torch.nn.Module, scales: Iterable[LayerScales]) -> None:
    """Behind each update, as a reload sets them to 1. Kernels read them from the device, some from the host."""
    for layer, found in zip(attentions(model), scales, strict=True):
        for kind, scale in zip("qkv", found, strict=True):
            getattr(layer, f"_{kind}_scale").fill_(scale)
            setattr(layer, f"_{kind}_scale_float", scale)


def attentions(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def _in_fp8(layer: Any) -> bool:
    return layer.kv_cache_dtype.startswith("fp8")


def _quantized(model: torch.nn.Module) -> dict[str, Any]:
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, LinearBase))
    return {name: module for name, module in modules if not isinstance(module.quant_method, UnquantizedLinearMethod)}


def hf_names(model: torch.nn.Module, module: str) -> list[str]:
    """Of the checkpoint's tensors that vLLM has joined in a module."""
    parent, _, last = module.rpartition(".")
    joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return [f"{parent}.{part}.weight" for part in joined.get(last, [last])]


class InFp8:
    """An update under way. Behind it a fixed input is multiplied with the matrices of one layer, another for each
    version: as they were published, and as vLLM has them."""

    def __init__(self, model: torch.nn.Module, version: int, fp8: Fp8Version) -> None:
        self._model, self._fp8 = model, fp8
        by_layer: dict[int, dict[tuple[str, ...], Any]] = {}
        for name, module in _quantized(model).items():
            names = tuple(hf_names(model, name))
            found = PROJECTION.fullmatch(names[0])
            # With tensor parallelism a module has a part of its matrix; names are compared then, and probabilities.
            if found is not None and module.tp_size == 1:
                by_layer.setdefault(int(found[1]), {})[names] = module
        layers = sorted(by_layer)
        self._modules = by_layer[layers[version % len(layers)]] if layers else {}
        self._wanted = {name for names in self._modules for name in names}
        self._who = f"version {version}"
        self._expected: dict[str, Tensor] = {}

    def watching(self, published: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """On their way into the model. Scales of a matrix come behind it."""
        values = dict[str, Tensor]()
        for name, tensor in published:
            whose = name.removesuffix(SCALES)
            if whose in self._wanted:
                if tensor.dtype == E4M3:
                    values[name] = tensor
                elif whose == name:
                    self._expect(name, tensor)
                else:
                    self._expect(whose, dequantize(Quantized(values.pop(whose), tensor, WEIGHT_BLOCK)))
            yield name, tensor

    def _expect(self, name: str, weight_O_I: Tensor) -> None:
        self._expected[name] = _input(weight_O_I.shape[1], weight_O_I.device) @ weight_O_I.to(torch.bfloat16).t()

    @torch.no_grad()
    def finish(self) -> None:
        if self._fp8.kv_scales:
            set_kv_scales(self._model, self._fp8.kv_scales)
        names, gaps = list[str](), list[Tensor]()
        for parts, module in self._modules.items():
            expected_N_O = torch.cat([self._expected[part] for part in parts], 1).float()
            found_N_O = module.quant_method.apply(module, _input(module.input_size, expected_N_O.device))
            gaps.append(relative_gap(found_N_O.float(), expected_N_O))
            names.append(" and ".join(parts))
        for name, gap in zip(names, torch.stack(gaps).tolist() if gaps else [], strict=True):
            check_gap(name, gap, self._who, ALLOWED)


def _input(inputs: int, device: torch.device) -> Tensor:
    return fixed_input(inputs).to(device, torch.bfloat16)
