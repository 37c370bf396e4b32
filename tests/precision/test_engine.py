"""FP8 in the native engine: the numbers that it should have, and a refused sync that leaves nothing behind."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config.drafter import NgramDrafter, NoDrafter
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8
from asyncrl.engines.native.build import build_native
from asyncrl.engines.native.cpu import fp8
from asyncrl.engines.native.cpu.cache import KvCache
from asyncrl.engines.native.cpu.decoding import Policy
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.errors import DivergenceError, EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Decoder
from asyncrl.precision.quantizer import WEIGHT_BLOCK, dequantize, quantize, rounded, to_e4m3
from asyncrl.types import WeightManifest
from tests.support.driving import LONG, ask, collect, collect_all, native, serving
from tests.support.fp8_publishing import Publishing, publishing
from tests.support.parity import gathered, reference_logits
from tests.support.tiny_model import tiny_checkpoint

QUANTIZED = ("fp8", "fp8_kv", "fp8_full")


def engine(path: Path, precision: str, drafter: Any = None, **options: Any) -> NativeEngine:
    settings = Settings(max_batch=8, max_length=256, prefill_chunk=64)
    made = build_native(path, settings, drafter or NoDrafter(), name="fp8", precision=precision, fp8=Fp8(**options))
    assert isinstance(made, NativeEngine)
    return made


def _in_fp8(model: PreTrainedModel) -> PreTrainedModel:
    """transformers with FP8 projections, made with hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = dequantize(quantize(module.weight.data, WEIGHT_BLOCK))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0].flatten(0, -2)).view_as(inputs[0]),))
    return model


def test_projections_are_those_of_transformers_in_fp8(tmp_path: Path) -> None:
    """Widths that are no multiples of 128, one answer after a prompt in chunks."""
    exact = tiny_checkpoint(tmp_path, intermediate_size=136)
    request = ask("x", LONG[:100], temperature=0.0, max_tokens=24)

    async def run() -> Any:
        async with serving(engine(tmp_path, "fp8")) as serves:
            return await collect(serves, request)

    answer = asyncio.run(run())
    in_full = gathered(reference_logits(exact, request, answer), answer.tokens)
    expected = gathered(reference_logits(_in_fp8(exact), request, answer), answer.tokens)
    # The last bits of sums differ, and now and then one turns the rounding of a number.
    assert np.abs(answer.logprobs - expected).mean() < 0.1 * np.abs(in_full - expected).mean()
    assert np.abs(in_full - expected).mean() > 1e-3


def test_the_cache_holds_numbers_of_e4m3(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        made = engine(tmp_path, "fp8_kv")
        async with serving(made) as serves:
            await collect_all(serves, [ask(str(i), LONG[: 20 + i]) for i in range(4)])
            policy, cache = made._decoding.policy, made._decoding.cache
            assert isinstance(policy, fp8.Fp8Policy)
            for layer, (_, *scales) in enumerate(policy.kv_scales):
                for offset, scale in enumerate(scales):
                    held = cache._data[2 * layer + offset]
                    codes = held / scale
                    assert held.count_nonzero() > 1000
                    assert torch.allclose(to_e4m3(codes).float(), codes, rtol=1e-5)

    asyncio.run(run())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_do_not_know_of_it(precision: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        made = engine(tmp_path, precision)
        async with serving(made):
            assert type(made._decoding.policy) is Policy
            assert type(made._decoding.cache) is KvCache

    asyncio.run(run())


def _greedy(count: int = 3) -> list[Any]:
    return [ask(str(i), LONG[: 10 + 7 * i], temperature=0.0) for i in range(count)]


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_version_is_served_with_its_own_scales(precision: str, tmp_path: Path) -> None:
    """What an engine computes after a sync is what one that starts with those weights does."""
    tiny_checkpoint(tmp_path / "old")
    tiny_checkpoint(tmp_path / "new", seed=1)

    async def run() -> None:
        with publishing(tmp_path / "new", precision, kv_scales="engine") as new:
            async with serving(engine(tmp_path / "old", precision)) as synced:
                assert (await synced.load_weights(new.publish(1), "keep")).version == 1
                found = await collect_all(synced, _greedy())
        async with serving(engine(tmp_path / "new", precision)) as fresh:
            for one, other in zip(found, await collect_all(fresh, _greedy()), strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)

    asyncio.run(run())


def test_a_version_without_fp8_is_served_as_by_the_ordinary_engine(tmp_path: Path) -> None:
    """The way back of a run that falls back."""
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        with publishing(tmp_path, "fp32") as plain:
            async with serving(engine(tmp_path, "fp8_full")) as serves, serving(native(tmp_path)) as ordinary:
                quantized = await collect_all(serves, _greedy())
                await serves.load_weights(plain.publish(1), "keep")
                found, exact = await collect_all(serves, _greedy()), await collect_all(ordinary, _greedy())
        for one, other, before in zip(found, exact, quantized, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            assert np.abs(one.logprobs - before.logprobs).max() > 1e-3

    asyncio.run(run())


def test_an_ordinary_engine_refuses_fp8_versions(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        with publishing(tmp_path, "fp8") as trainer:
            async with serving(native(tmp_path)) as serves:
                with pytest.raises(WeightSyncError, match="is meant for FP8, and this engine was started without"):
                    await serves.load_weights(trainer.publish(1), "keep")

    asyncio.run(run())


def _refused(tmp_path: Path, trainer: Publishing, manifest: WeightManifest, error: type[Exception], said: str) -> None:
    """The refusal, and that answers are afterwards what they were before."""

    async def run() -> None:
        async with serving(engine(tmp_path, "fp8_full")) as serves:
            before = await collect_all(serves, _greedy())
            with pytest.raises(error, match=said):
                await serves.load_weights(manifest, "recompute")
            assert serves.stats().version == 0
            for one, other in zip(before, await collect_all(serves, _greedy()), strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)

    asyncio.run(run())


def test_both_sides_must_quantize_the_same_layers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full", fp8=Fp8(keep_first=1)) as trainer:
        said = r"do not quantize the same layers, differing in model\.layers\.0\.mlp\.down_proj\.weight"
        _refused(tmp_path, trainer, trainer.publish(1), WeightSyncError, said)
    with publishing(tmp_path, "fp8") as trainer:
        _refused(tmp_path, trainer, trainer.publish(1), WeightSyncError, "differing in kv_cache")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full") as trainer:
        trainer.model.blocks()[1].down_proj.weight.data[3, 3] = torch.nan
        said = r"model\.layers\.1\.mlp\.down_proj\.weight has values that are infinite or not a number, in 1 of its"
        _refused(tmp_path, trainer, trainer.publish(1), DivergenceError, said)


def test_stale_weight_scales_are_seen_by_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values with the scales of the version before, as an engine has them that forgets to load scales."""
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(fp8, "quantized_weight", StaleScales())
    with publishing(tmp_path, "fp8_full") as trainer:
        trainer.grow(1.5, "o_proj")
        said = r"a product with model\.layers\.1\.self_attn\.o_proj\.weight in FP8 is off by 33"
        _refused(tmp_path, trainer, trainer.publish(1), WeightSyncError, said)


class StaleScales:
    """`quantized_weight` as it would be if the scales of the first version were never replaced."""

    def __init__(self) -> None:
        self._scales: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, weight: torch.Tensor, options: Fp8) -> torch.Tensor:
        fresh = quantize(weight, WEIGHT_BLOCK, name=name)
        return dequantize(fresh._replace(scales_B_B=self._scales.setdefault(name, fresh.scales_B_B)))


def test_stale_kv_scales_are_seen_by_the_engine(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full") as trainer:
        trainer.fp8._seen.extend([list(LONG), list(LONG[::-1])])
        stale = trainer.fp8.of(trainer.model)()
        trainer.grow(8.0)
        manifest = msgspec.structs.replace(trainer.publish(1), fp8=stale)
        _refused(tmp_path, trainer, manifest, WeightSyncError, "the scale of values in layer 0 is .*: stale scales")


def test_scales_of_the_trainer_are_used(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        with publishing(tmp_path, "fp8_kv") as trainer:
            trainer.fp8._seen.extend([list(LONG), list(LONG[::-1])])
            made = engine(tmp_path, "fp8_kv")
            async with serving(made) as serves:
                policy = made._decoding.policy
                assert isinstance(policy, fp8.Fp8Policy)
                own = policy.kv_scales
                manifest = trainer.publish(1)
                await serves.load_weights(manifest, "keep")
                assert manifest.fp8 is not None
                assert policy.kv_scales == manifest.fp8.kv_scales != own
                await collect_all(serves, _greedy())

    asyncio.run(run())


def test_keys_in_fp8_need_qk_norm(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")

    async def start(**options: Any) -> None:
        async with serving(engine(tmp_path, "fp8_full", **options)):
            pass

    with pytest.raises(EngineError, match="need a model with QK-norm"):
        asyncio.run(start())
    asyncio.run(start(allow_kv_without_qk_norm=True))


@pytest.mark.parametrize("precision", QUANTIZED)
def test_drafts_change_nothing(precision: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run(drafter: Any) -> list[Any]:
        async with serving(engine(tmp_path, precision, drafter)) as serves:
            return await collect_all(serves, _greedy())

    drafted = asyncio.run(run(NgramDrafter(tokens=3)))
    for one, other in zip(asyncio.run(run(None)), drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_kept_layers_are_exact(tmp_path: Path) -> None:
    """With all but the last layer kept, only the last is in FP8."""
    tiny_checkpoint(tmp_path)
    made = fp8.Fp8Policy(tmp_path, torch.float32, 64, _numerics(keep_first=1))
    model, _ = load_model(tmp_path)
    plain, found = _projections(model), _projections(made.model)
    assert torch.equal(plain[0], found[0])
    assert not torch.equal(plain[1], found[1])


def _projections(model: Decoder) -> list[torch.Tensor]:
    return [layer.down_proj.weight.data for layer in model.blocks()]


def _numerics(**options: Any) -> Any:
    return fp8.Numerics(weights=True, kv=False, fp8=Fp8(**options))
