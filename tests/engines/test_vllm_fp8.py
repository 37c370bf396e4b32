"""FP8 in vLLM's worker: names before anything is loaded, scales of the cache, products before a token is sampled."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor, nn

from tests.support import needs

pytest.importorskip("vllm", reason=needs.VLLM)

from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.config.precision import Fp8
from asyncrl.engines.vllm.fp8 import InFp8, check_names, set_kv_scales
from asyncrl.engines.vllm.loader import CheckpointLoader
from asyncrl.engines.vllm.options import LOADER, engine_args
from asyncrl.errors import WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.precision.quantizer import WEIGHT_BLOCK, Quantized, dequantize, quantize
from asyncrl.types import Fp8Version, WeightManifest
from tests.support.fp8_publishing import publishing
from tests.support.real_vllm import TINY, needs_vllm
from tests.support.tiny_model import tiny_checkpoint

INPUTS = 64


class Narrow:
    """What vLLM calls a method: here FP8 weights with one scale, and activations as they are."""

    def apply(self, layer: Any, x_N_I: Tensor) -> Tensor:
        return x_N_I @ (layer.weight.to(torch.bfloat16) * layer.scale).t()


class Linear(LinearBase):
    def __init__(self, outputs: int, method: Any) -> None:
        nn.Module.__init__(self)
        self.input_size, self.output_size, self.tp_size, self.quant_method = INPUTS, outputs, 1, method
        self.weight = nn.Parameter(torch.zeros(outputs, INPUTS), requires_grad=False)

    def load(self, *parts: Tensor) -> None:
        weight_O_I = torch.cat(parts).float()
        self.scale = weight_O_I.abs().max() / 448
        self.weight = nn.Parameter((weight_O_I / self.scale).to(torch.float8_e4m3fn), requires_grad=False)


class Cache(Attention):
    def __init__(self, dtype: str, backend: str = "CUSTOM") -> None:
        nn.Module.__init__(self)
        self.kv_cache_dtype = dtype
        self.attn_backend: Any = SimpleNamespace(get_name=lambda: backend)
        for kind in "qkv":
            self.register_buffer(f"_{kind}_scale", torch.tensor(1.0))


class Model(nn.Module):
    """Two layers, each with a joined matrix and one by itself, an output matrix, and a cache."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, dtype: str = "fp8", backend: str = "CUSTOM") -> None:
        super().__init__()
        layers = [nn.Module() for _ in range(2)]
        for layer in layers:
            layer.self_attn = nn.Module()
            layer.self_attn.qkv_proj, layer.self_attn.o_proj = Linear(96, Narrow()), Linear(64, Narrow())
            layer.self_attn.attn = Cache(dtype, backend)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)
        self.lm_head = Linear(8, UnquantizedLinearMethod())

    def attention(self, layer: int) -> Any:
        return self.model.layers[layer].self_attn


NAMES = tuple(f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkvo")


def manifest(*quantized: str, scales: tuple[tuple[float, float, float], ...] = ()) -> WeightManifest:
    fp8 = Fp8Version(quantized, scales)
    return WeightManifest(version=5, tensors=(), total_bytes=0, digest="", location="", fp8=fp8)


def published(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": 64, "k": 16, "v": 16, "o": 64}
    found = {name: torch.randn(sizes[name[-13]], INPUTS, generator=generator).bfloat16() for name in NAMES}
    return {"model.embed_tokens.weight": torch.ones(8, INPUTS), **found}


def load(model: Model, weights: dict[str, Tensor]) -> None:
    for layer in range(2):
        parts = [weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"].float() for part in "qkvo"]
        model.attention(layer).qkv_proj.load(*parts[:3])
        model.attention(layer).o_proj.load(parts[3])


def test_names_that_vllm_joined_are_the_trainers() -> None:
    check_names(Model(), manifest(*NAMES, "kv_cache", scales=((1.0, 1.0, 1.0),) * 2))
    check_names(Model("auto"), manifest(*NAMES))
    check_names(Model(), msgspec.structs.replace(manifest(), fp8=None))


@pytest.mark.parametrize(
    ("model", "meant", "said"),
    [
        (Model(), manifest(*NAMES), "do not quantize the same layers, differing in kv_cache"),
        (Model("auto"), manifest(*NAMES[1:]), "differing in model.layers.0.self_attn.q_proj.weight"),
        (Model(), manifest(*NAMES, "kv_cache", scales=((1.0, 1.0, 1.0),)), "KV scales for 1 layers, and 2 have any"),
        (
            Model("fp8", "FLASHINFER"),
            manifest(*NAMES, "kv_cache", scales=((1.0, 1.0, 1.0),) * 2),
            "which takes no new scales; use rollout.kv_scales=engine",
        ),
    ],
)
def test_what_differs_is_told(model: Model, meant: WeightManifest, said: str) -> None:
    with pytest.raises(WeightSyncError, match=said):
        check_names(model, meant)


def test_scales_reach_the_device_and_the_host() -> None:
    model = Model()
    places = [model.attention(layer).attn._k_scale for layer in range(2)]
    set_kv_scales(model, [(0.5, 0.25, 2.0), (1.0, 4.0, 8.0)])
    for layer, scales in enumerate([(0.5, 0.25, 2.0), (1.0, 4.0, 8.0)]):
        attention = model.attention(layer).attn
        assert tuple(getattr(attention, f"_{kind}_scale").item() for kind in "qkv") == scales
        assert tuple(getattr(attention, f"_{kind}_scale_float") for kind in "qkv") == scales
        assert attention._k_scale is places[layer], "captured graphs read it there"


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("blocks", [False, True])
def test_products_are_those_of_the_published_weights(version: int, blocks: bool) -> None:
    model, weights = Model(), published()
    travelling = dict(weights)
    if blocks:
        quantized = {name: quantize(weights.pop(name).float(), WEIGHT_BLOCK) for name in NAMES}
        travelling = weights.copy()
        for name, each in quantized.items():
            travelling |= {name: each.values_N_C, f"{name}_scale_inv": each.scales_B_B}
            weights[name] = dequantize(each)
    update = InFp8(model, version, Fp8Version())
    assert [name for name, _ in update.watching(travelling.items())] == list(travelling)
    load(model, weights)
    update.finish()


@pytest.mark.parametrize(("part", "name"), [("qkv_proj", "q_proj.weight and .*v_proj"), ("o_proj", "o_proj")])
def test_a_stale_scale_is_caught_in_the_layer_whose_turn_it_is(part: str, name: str) -> None:
    model, weights = Model(), published()
    load(model, weights)
    getattr(model.attention(1), part).scale *= 1.3
    for version, raises in [(4, False), (5, True)]:
        update = InFp8(model, version, Fp8Version())
        list(update.watching(weights.items()))
        if raises:
            with pytest.raises(WeightSyncError, match=rf"version 5: a product with .*{name}.* in FP8 is off by 30"):
                update.finish()
        else:
            update.finish()


def test_old_values_are_caught() -> None:
    model = Model()
    load(model, published(seed=1))
    update = InFp8(model, 5, Fp8Version())
    list(update.watching(published().items()))
    with pytest.raises(WeightSyncError, match="stale scales or values; publish again"):
        update.finish()


def test_kept_layers_are_kept_by_vllm_as_well(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, num_hidden_layers=3)
    fp8 = Fp8(keep_first=1, keep_last=1)
    online = engine_args(tmp_path, VllmEngine(), NoDrafter(), "fp8", fp8)
    assert online.quantization == "fp8_per_tensor"
    kept = online.quantization_config.ignore  # type: ignore[union-attr]
    assert {name.split(".")[2] for name in kept} == {"0", "2"}
    assert len(kept) == 14
    args = engine_args(tmp_path, VllmEngine(quantization="fp8_per_block"), NoDrafter(), "fp8", fp8)
    overrides: Any = args.hf_overrides
    assert overrides["quantization_config"]["ignored_layers"] == kept
    assert overrides["head_dtype"] == "float32"


def test_a_checkpoint_becomes_the_blocks_that_the_trainer_publishes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    engine = VllmEngine(quantization="fp8_per_block")
    loader = CheckpointLoader(LoadConfig(load_format=LOADER))
    kept = ["model.layers.1.mlp.up_proj"]
    hf_config = SimpleNamespace(quantization_config={"ignored_layers": kept})
    config: Any = SimpleNamespace(model=str(tmp_path), revision=None, hf_config=hf_config)
    found: dict[str, Tensor] = dict(loader.get_all_weights(config, nn.Linear(1, 1)))
    model, _ = load_model(tmp_path, torch.float32)
    expected = dict(hf_tensors(model))
    with publishing(tmp_path, "fp8", engine=engine) as publisher:
        names = {spec.name for spec in publisher.publish(1).tensors}
    assert names - set(found) == {f"{kept[0]}.weight_scale_inv"}
    for name, weight in expected.items():
        scales = found.get(f"{name}_scale_inv")
        if scales is None:
            torch.testing.assert_close(found[name], weight)
        else:
            meant = dequantize(quantize(weight, WEIGHT_BLOCK))
            torch.testing.assert_close(dequantize(Quantized(found[name], scales, WEIGHT_BLOCK)), meant, rtol=0, atol=0)


def test_a_drafting_head_is_read_as_it_is(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    config: Any = SimpleNamespace(model=str(tmp_path), revision=None, hf_config=SimpleNamespace())
    found = dict(CheckpointLoader(LoadConfig(load_format=LOADER)).get_all_weights(config, nn.Linear(1, 1)))
    assert "model.layers.0.mlp.up_proj.weight" in found
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


@needs_vllm
def test_an_engine_changes_its_scales_only_where_it_must(tmp_path: Path) -> None:
    from asyncrl.engines.vllm.engine import VllmEngine as Vllm

    tiny_checkpoint(tmp_path)
    engine = Vllm(tmp_path, TINY, NoDrafter(), name="vllm")

    def sent(*scales: tuple[float, float, float]) -> Any:
        fp8 = engine._with_settled_scales(manifest(scales=scales)).fp8
        assert fp8 is not None
        return fp8.kv_scales

    assert sent() == ()
    engine._kv_scales = sent((3.0, 0.2, 0.5), (1.0, 1.0, 1.0))
    assert engine._kv_scales == ((4.0, 0.25, 1.0), (1.0, 1.0, 1.0))
    assert sent((2.0, 0.24, 0.3), (0.9, 0.9, 1.1)) == ((4.0, 0.25, 1.0), (1.0, 1.0, 2.0))
    assert sent() == engine._kv_scales, "a trainer that has seen nothing yet leaves them"
    assert engine._with_settled_scales(msgspec.structs.replace(manifest(), fp8=None)).fp8 is None
