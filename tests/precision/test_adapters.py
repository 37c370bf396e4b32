"""LoRA adapters to engines in FP8: they merge and quantize, and hold what they would have been sent whole."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8, numerics
from asyncrl.engines.native.build import build_native
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.kernels.shapes import Kernels, Merge
from asyncrl.engines.native.cuda.kernels.torch_kernels import KERNELS
from asyncrl.errors import WeightSyncError
from asyncrl.models.names import hf_tensors
from asyncrl.precision.layers import SCALES
from asyncrl.precision.publication import Fp8Publication
from asyncrl.precision.quantizer import E4M3
from asyncrl.types import WeightManifest
from asyncrl.weights.flat import Flat
from tests.precision.test_cuda_engine import QUANTIZED, SETTINGS, in_turn
from tests.support.adapters import LORA, publishing_adapters
from tests.support.driving import Answer, serving
from tests.support.fp8_publishing import publishing
from tests.support.tiny_model import tiny_checkpoint

Publish = Callable[[int], WeightManifest]


@contextmanager
def adapters_in_fp8(path: Path, precision: Any, device: Any, **fp8: Any) -> Iterator[Publish]:
    """As a trainer publishes them for an engine in FP8."""
    run = Run(
        rollout=Rollout(precision=precision, fp8=Fp8(**fp8)), engine=Settings(device=device), trainer=Trainer(lora=LORA)
    )
    with publishing_adapters(path) as publish:
        meant = Fp8Publication(run, publish.trainer.model.config)
        assert not meant.quantizes

        def published(version: int) -> WeightManifest:
            manifest = publish(version)
            return msgspec.structs.replace(manifest, fp8=meant.of(publish.trainer.model)())

        yield published


def paged(path: Path, precision: str, kernels: Kernels = KERNELS, **fp8: Any) -> CudaEngine:
    found, where = numerics(precision, Fp8(**fp8)), torch.device("cpu")
    return CudaEngine(path, SETTINGS, name="fp8", device=where, numerics=found, adapted=LORA.targets, kernels=kernels)


@pytest.mark.parametrize("options", [{}, {"power_of_two": True}, {"keep_first": 1}], ids=str)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_gpu_engine_holds_what_it_would_be_sent_whole(
    precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit in FP8, with widths that are no multiples of 128; what is not in FP8 travels whole in bf16."""
    tiny_checkpoint(tmp_path / "base", intermediate_size=136)

    async def held(publish: Publish, versions: Sequence[int]) -> tuple[dict[str, Tensor], list[list[float]]]:
        made = paged(tmp_path / "base", precision, **options)
        async with serving(made) as engine:
            for version in versions:
                manifest = publish(version)
                assert (await engine.load_weights(manifest, "keep")).digest == manifest.digest
            return {name: each.clone() for name, each in made._intake.held.items()}, made._decoding.memory.scales

    with adapters_in_fp8(tmp_path / "base", precision, "cuda", **options) as publish:
        found, scales = asyncio.run(held(publish, [1, 3, 2]))
    with publishing_adapters(tmp_path / "base") as trained:
        trained.trainer.saved(2, tmp_path / "merged")
    with publishing(tmp_path / "merged", precision, "cuda", fp8=Fp8(**options)) as whole:
        expected, other_scales = asyncio.run(held(whole.publish, [2]))
    assert found.keys() == expected.keys()
    in_fp8 = [name for name, tensor in expected.items() if tensor.dtype == E4M3]
    assert len(in_fp8) == (0 if precision == "fp8_kv" else 7 * (2 - len(options.keys() & {"keep_first"})))
    for name, tensor in expected.items():
        if name.removesuffix(SCALES) in in_fp8:
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=0.01, atol=0.0)
    assert len(scales) == len(other_scales)  # they are powers of two: a last bit may make one twice as large
    assert np.abs(np.log2(scales) - np.log2(other_scales)).max(initial=0) <= 1


def test_stale_weight_scales_are_seen_by_the_product(tmp_path: Path) -> None:
    """Merged values with the scales of the version before."""
    tiny_checkpoint(tmp_path)

    def forgetful(merges: Sequence[Merge]) -> Callable[[Flat], None]:
        merge = KERNELS.merger(merges)

        def run(flat: Flat) -> None:
            before = [(each, each.clone()) for one in merges for each in one.scales]
            merge(flat)
            for each, old in before:
                each.copy_(old)

        return run

    async def run(publish: Publish) -> None:
        async with serving(paged(tmp_path, "fp8_full", KERNELS._replace(merger=forgetful))) as engine:
            before = await in_turn(engine)
            with pytest.raises(WeightSyncError, match=r"a product with model\.layers\.1\..* in FP8 is off by"):
                await engine.load_weights(publish(1), "recompute")
            assert engine.stats().version == 0
            for one, other in zip(before, await in_turn(engine), strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)

    with adapters_in_fp8(tmp_path, "fp8_full", "cuda") as publish:
        asyncio.run(run(publish))


@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_simulation_on_a_cpu_merges_as_well(precision: str, tmp_path: Path) -> None:
    """Also a version that has left FP8."""
    tiny_checkpoint(tmp_path / "base")

    def simulated(path: Path) -> NativeEngine:
        settings = Settings(max_batch=8, max_length=256, prefill_chunk=64)
        made = build_native(path, settings, Run().drafter, name="fp8", precision=precision)
        assert isinstance(made, NativeEngine)
        return made

    async def held(publish: Publish) -> tuple[dict[str, Tensor], list[Answer]]:
        made = simulated(tmp_path / "base")
        async with serving(made) as engine:
            await engine.load_weights(publish(1), "keep")
            found = {name: each.clone() for name, each in hf_tensors(made._decoding.policy.model)}
            await engine.load_weights(msgspec.structs.replace(publish(2), fp8=None), "keep")
            return found, await in_turn(engine)

    with adapters_in_fp8(tmp_path / "base", precision, "cpu") as publish:
        found, left = asyncio.run(held(publish))
    with publishing_adapters(tmp_path / "base") as trained:
        for version in (1, 2):
            trained.trainer.saved(version, tmp_path / str(version))
    with publishing(tmp_path / "1", precision) as first, publishing(tmp_path / "2", precision) as second:
        expected, plain = asyncio.run(held(lambda version: (first if version == 1 else second).publish(version)))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for one, other in zip(left, plain, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
