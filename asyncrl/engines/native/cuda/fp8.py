"""FP8 on a GPU: the weights as they are multiplied with, and what is checked before a version counts.

**Weights.** Every projection of the checkpoint is quantized by itself, and a fused matrix holds the blocks of its
projections one below the other, in storage that stays where it is. A published version brings values and scales under
two names, and both are views of this storage.

**Checks.** All without touching what is served, but for one layer: its tensors are loaded first, as the others will be,
and multiplied with a fixed input by the very kernel that decodes. If that is not what the published numbers give, the
layer is put back, and the engine goes on as it was. KV scales are measured with the published weights, layer by layer,
before anything is loaded. Whatever can be is done in a thread, while decoding goes on. Of a version that came as
adapters, the published weights are those merged and quantized by torch; what is served comes from a kernel.

Axis suffixes: O outputs, I inputs, X rows of blocks, B blocks of inputs.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import NO_QK_NORM, Numerics
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.kernels.shapes import Fp8Matrix, Kernels, Kv, Queries
from asyncrl.engines.native.cuda.model import Block, CudaModel
from asyncrl.engines.native.cuda.pages import PAGE
from asyncrl.engines.native.cuda.timeline import Timeline
from asyncrl.engines.native.cuda.updates import Update
from asyncrl.engines.native.weight_loading import Receiver, not_in_fp8
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import Part, cut, hf_tensors
from asyncrl.precision.audit import check_gap, check_layers, fixed_input, relative_gap
from asyncrl.precision.kv_scales import CHECK_LENGTH, LayerScales, check_scales, fixed_samples, scales_of
from asyncrl.precision.layers import KV_CACHE, SCALES, is_quantized
from asyncrl.precision.quantizer import ACTIVATION_BLOCK, SIDE, WEIGHT_BLOCK, Quantized, quantize, reference_product
from asyncrl.types import WeightManifest

_TILE = 16
_GRAPH_BYTES = 1 << 30
"""For the matrices of one layer, put together, and what is computed with them."""
_OLDEST = (8, 9)
"""Compute capability that has FP8."""
Load = Callable[[Iterable[str]], None]
"""Published tensors of these names into those held."""
Weights = Callable[[], tuple[Tensor, Iterable[tuple[Tensor, Block]]]]
"""Embeddings, and each layer with its first norm."""


class KvGauge:
    """Which keys and values a version has, before it is served: fixed prompts, with weights that lie elsewhere.

    A forward pass that is launched kernel by kernel takes Python 50 ms (H200, 8B), beside a step loop that needs the
    interpreter as well. But publications come to the same few places of memory again and again, so the pass over each
    is captured, and the next time it is one launch. Used by one thread at a time, beside decoding and behind it.
    """

    def __init__(self, model: CudaModel, length: int) -> None:
        samples = [sample[:length] for sample in fixed_samples(model.embedding_V_E.shape[0])]
        self._model, device = model, model.embedding_V_E.device
        self._queries, self._tokens_T = _tiles(samples, device)
        self._kv, self._length = Kv(model.new_pages(len(samples), PAGE, 1)[0]), len(samples[0])
        """One layer's pages serve all layers."""
        self._largest_L_2_T = torch.zeros(len(model.blocks), 2, len(samples) * self._length, device=device)
        self._graphs = GraphPool(Timeline(device, urgent=False), _GRAPH_BYTES)

    def scales(self, weights: Weights, place: Hashable = None) -> tuple[LayerScales, ...]:
        """`place` says where the weights lie, if they may come there again."""
        with self._graphs.timeline.work():
            launch = partial(self._launch, weights)
            if place is not None and self._graphs.worthwhile(place, after=1):
                self._graphs.run(place, launch)
            else:
                launch()
            return scales_of(self._largest_L_2_T)

    def _launch(self, weights: Weights) -> None:
        embedding_V_E, layers = weights()
        x_T_E, queries = embedding_V_E[self._tokens_T], [self._queries]
        for (norm_E, block), largest_2_T in zip(layers, self._largest_L_2_T, strict=True):
            x_T_E = self._model.layer(norm_E, block, x_T_E, queries, queries, self._kv)
            stored_2_X_K_S_D = self._kv.pages_2_X_K_S_D[:, :, :, : self._length]
            largest_2_T.copy_(stored_2_X_K_S_D.abs().amax((2, 4)).flatten(1))


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


def quantized_matrix(weight_O_I: Tensor, parts: Sequence[Part], *, power_of_two: bool) -> Fp8Matrix:
    found = [
        quantize(part_O_I, WEIGHT_BLOCK, name=name, power_of_two=power_of_two)
        for name, part_O_I in cut(weight_O_I, parts)
    ]
    values_O_I = torch.cat([each.values_N_C.view(torch.uint8) for each in found]).view(torch.float8_e4m3fn)
    scales_X_B = torch.cat([each.scales_B_B for each in found])
    return Fp8Matrix(values_O_I, scales_X_B, *_blocks([part.rows for part in parts], weight_O_I.device))


def _blocks(rows: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
    numbers, first = list[Tensor](), 0
    for count in rows:
        numbers.append(first + torch.arange(count) // SIDE)
        first += -(-count // SIDE)
    return torch.cat(numbers).to(device, torch.int32), all(count % SIDE == 0 for count in rows)


def views(matrix: Fp8Matrix, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Values and scales by the names that they are published under."""
    rows = [part.rows for part in parts]
    heights = [-(-count // SIDE) for count in rows]
    split = zip(parts, matrix.values_O_I.split(rows), matrix.scales_X_B.split(heights), strict=True)
    for part, values_O_I, scales_X_B in split:
        yield part.name, values_O_I
        yield part.name + SCALES, scales_X_B


class Fp8Weights:
    """The parameters of a model, quantized where they should be; what is replaced is freed."""

    def __init__(self, model: Decoder, numerics: Numerics) -> None:
        fp8, layers = numerics.fp8, model.config.layers
        self.parts = dict(model.parts())
        self.matrices: dict[str, Fp8Matrix] = {}
        """By the names of our parameters."""
        self.held: dict[str, Tensor] = {}
        """By published names."""
        for own, parts in self.parts.items():
            parameter = model.get_parameter(own)
            if numerics.weights and all(
                is_quantized(part.name, layers, keep_first=fp8.keep_first, keep_last=fp8.keep_last) for part in parts
            ):
                matrix = quantized_matrix(parameter.detach(), parts, power_of_two=fp8.power_of_two)
                self.matrices[own] = matrix
                self.held.update(views(matrix, parts))
                parameter.data = parameter.new_empty(0)
            else:
                self.held.update(cut(parameter.detach(), parts))

    @property
    def quantized(self) -> list[str]:
        return [part.name for own in self.matrices for part in self.parts[own]]

    def names(self, layer: int) -> list[str]:
        """What is published of a layer."""
        return [name for name in self.held if name.startswith(f"model.layers.{layer}.")]

    def of_layer(self, layer: int) -> dict[str, Fp8Matrix]:
        """By the names of a layer's parameters."""
        begin = f"layers.{layer}."
        return {own.removeprefix(begin): found for own, found in self.matrices.items() if own.startswith(begin)}

    def fused(self, layer: int, find: Callable[[str], Tensor], dtype: torch.dtype) -> dict[str, Tensor | Fp8Matrix]:
        """The parameters of a layer, made of published tensors."""
        begin, found = f"layers.{layer}.", dict[str, Tensor | Fp8Matrix]()
        for own, parts in ((own, parts) for own, parts in self.parts.items() if own.startswith(begin)):
            tensors, name = [find(part.name) for part in parts], own.removeprefix(begin)
            held = self.matrices.get(own)
            if held is not None:
                values_O_I = torch.cat([each.view(torch.uint8) for each in tensors]).view(torch.float8_e4m3fn)
                scales_X_B = torch.cat([find(part.name + SCALES) for part in parts])
                found[name] = held._replace(values_O_I=values_O_I, scales_X_B=scales_X_B)
            else:
                whole = torch.stack(tensors) if parts[0].flat else torch.cat(tensors)
                found[name] = whole.to(dtype)
        return found


class Expected(NamedTuple):
    """Products that the numbers of a version must give."""

    who: str
    layer: int
    products: dict[str, list[tuple[str, Tensor]]]
    """By parameters of the layer: of each published part, what the fixed input gives with it."""


class Fp8Serving:
    """Whether a published version may be served."""

    def __init__(self, model: CudaModel, weights: Fp8Weights, numerics: Numerics, length: int) -> None:
        self._model, self._weights, self._numerics = model, weights, numerics
        self._device = model.embedding_V_E.device
        self._gauge = KvGauge(model, length) if numerics.kv else None
        self._check = KvGauge(model, min(length, CHECK_LENGTH)) if numerics.kv else None
        """For scales that come along: these it need not find, only believe."""
        widths = {matrix.values_O_I.shape[1] for matrix in weights.matrices.values()}
        self._inputs = {width: fixed_input(width).to(self._device) for width in widths}
        self._codes = {
            width: quantize(x_N_I, ACTIVATION_BLOCK, power_of_two=numerics.fp8.power_of_two)
            for width, x_N_I in self._inputs.items()
        }

    def own_scales(self) -> tuple[LayerScales, ...]:
        """For the weights that are held; () where pages are not in FP8."""
        model = self._model
        layers = list(zip(model.input_norms, model.blocks, strict=True))
        return () if self._gauge is None else self._gauge.scales(lambda: (model.embedding_V_E, layers))

    @property
    def power_of_two(self) -> bool:
        return self._numerics.fp8.power_of_two

    @property
    def quantized(self) -> list[str]:
        return [*self._weights.quantized, *([KV_CACHE] if self._numerics.kv else [])]

    @torch.inference_mode()
    def kv_scales(self, manifest: WeightManifest, update: Update, receiver: Receiver) -> tuple[LayerScales, ...]:
        """Of a version, if they can be right; () where pages are not in FP8."""
        who, meant = _who(manifest, receiver), manifest.fp8
        if meant is None:
            return ()
        gauge = self._check if meant.kv_scales else self._gauge
        if gauge is None:
            return ()
        own = gauge.scales(partial(self._published, update), update.place)
        if not meant.kv_scales:
            return own
        # Queries are not quantized here: there is nothing to compare theirs with.
        own = tuple((given[0], *scales[1:]) for given, scales in zip(meant.kv_scales, own, strict=False))
        check_scales(meant.kv_scales, own, who)
        return meant.kv_scales

    @torch.inference_mode()
    def expected(self, manifest: WeightManifest, update: Update, receiver: Receiver) -> Expected:
        """Of one layer, another one for each version."""
        fp8, find = self._numerics.fp8, update.find
        layer = fp8.keep_first + manifest.version % max(1, len(self._model.blocks) - fp8.keep_first - fp8.keep_last)
        products: dict[str, list[tuple[str, Tensor]]] = {}
        for name, matrix in self._weights.of_layer(layer).items():
            codes = self._codes[matrix.values_O_I.shape[1]]
            products[name] = [
                (
                    part.name,
                    reference_product(codes, Quantized(find(part.name), find(part.name + SCALES), WEIGHT_BLOCK)),
                )
                for part in self._weights.parts[f"layers.{layer}.{name}"]
            ]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # they are read on another stream
        return Expected(_who(manifest, receiver), layer, products)

    def probe(self, expected: Expected, load: Load) -> None:
        """Load the layer and multiply with it. This waits for the running step, and requests wait for it."""
        weights = self._weights
        names = weights.names(expected.layer)
        old = {name: weights.held[name].clone() for name in names}
        load(names)
        try:
            self._check_products(expected)
        except WeightSyncError:
            for name, tensor in old.items():
                weights.held[name].copy_(tensor)
            raise

    def _check_products(self, expected: Expected) -> None:
        names, gaps = list[str](), list[Tensor]()
        for name, matrix in self._weights.of_layer(expected.layer).items():
            x_N_I, parts = self._inputs[matrix.values_O_I.shape[1]], expected.products[name]
            found_N_O = self._model.product_gauge(x_N_I, matrix).split([part_N_O.shape[1] for _, part_N_O in parts], 1)
            names += [part for part, _ in parts]
            gaps += [relative_gap(found, part_N_O) for found, (_, part_N_O) in zip(found_N_O, parts, strict=True)]
        if gaps:  # of all parts at once, as each would wait for the GPU
            for part, gap in zip(names, torch.stack(gaps).tolist(), strict=True):
                check_gap(part, gap, expected.who)

    def _published(self, update: Update) -> tuple[Tensor, Iterable[tuple[Tensor, Block]]]:
        dtype, find = self._model.embedding_V_E.dtype, update.find

        def layers() -> Iterable[tuple[Tensor, Block]]:
            for layer in range(len(self._model.blocks)):
                named = self._weights.fused(layer, find, dtype)
                norm_E = named["input_norm"]
                assert isinstance(norm_E, Tensor)
                yield norm_E, Block.of(named, self._model.config.experts_of(layer))

        return find("model.embed_tokens.weight").to(dtype), layers()


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
