"""Experts that vLLM's kernel for CPUs pads, with a dense layer between: each version is what a fresh load would be."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config.drafter import NoDrafter
from asyncrl.config.trainer import Lora
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.models.checkpoint import load_model
from asyncrl.types import WeightManifest
from tests.support import needs
from tests.support.adapters import Adapted, publishing_adapters
from tests.support.driving import LONG, Answer, ask, collect, collect_all, publishing, serving
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import TINY, SharedVllm, needs_vllm
from tests.support.routes import routes_of, shape_of
from tests.support.tiny_model import tiny_checkpoint

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = {"num_hidden_layers": 3, "mlp_only_layers": [1], "moe_intermediate_size": 48, "norm_topk_prob": False}
LORA = Lora(rank=4, alpha=8.0)
"""On attention, on experts and on the dense layer."""
EXACT = 1e-3
"""Largest difference of fp32 log-probabilities."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path) -> list[PreTrainedModel]:
    return [tiny_checkpoint(folder / str(seed), "qwen3_moe", seed=seed, **SHAPE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def shared(folder: Path, models: list[PreTrainedModel]) -> Iterator[SharedVllm]:
    driver = SharedVllm(folder / "0", adapted=LORA.targets)
    yield driver
    driver.close()


def _updated(shared: SharedVllm, publish: Callable[[int], WeightManifest], wanted: PreTrainedModel) -> None:
    """The next version computes what `wanted` does."""
    request = ask("a", max_tokens=60)

    async def run() -> None:
        async with shared.engine() as engine:
            await engine.load_weights(publish(engine.stats().version + 1), "keep")
            answer = await collect(engine, request)
        expected = gathered(reference_logits(wanted, request, answer), answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)

    shared.run(run())


def test_whole_versions(shared: SharedVllm, folder: Path, models: list[PreTrainedModel]) -> None:
    for seed in (1, 0, 1):
        with publishing(folder / str(seed)) as publish:
            _updated(shared, publish, models[seed])


def test_adapters_are_merged_into_the_experts_of_the_base(
    shared: SharedVllm, folder: Path, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    merged = Adapted(folder / "0", LORA).saved(1, tmp_path)
    with publishing(folder / "1") as publish:
        _updated(shared, publish, models[1])
    with publishing_adapters(folder / "0", LORA) as publish:
        _updated(shared, partial(publish, like=1), merged)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)
def test_on_a_gpu_routes_come_back_with_the_tokens(folder: Path, models: list[PreTrainedModel]) -> None:
    """In a prompt that is computed, one that is in the cache already, and behind an update. Some scores are so close
    that sums in another order turn them."""
    decoder, _ = load_model(folder / "0")
    requests = [ask(str(number), LONG[:40], seed=number, max_tokens=30) for number in range(3)]

    async def run() -> list[Answer]:
        async with serving(build_vllm(folder / "0", TINY, NoDrafter(), name="vllm", routes=True)) as engine:
            found = [await collect(engine, requests[0]), *await collect_all(engine, requests[1:])]
            with publishing(folder / "0") as publish:
                await engine.load_weights(publish(1), "keep")
            return [*found, await collect(engine, requests[0])]

    for request, answer in zip([*requests, requests[0]], asyncio.run(run()), strict=True):
        fed = (*request.tokens, *answer.tokens.tolist()[:-1])
        returned = shape_of(decoder).read(b"".join(segment.route_bytes for segment in answer.segments))
        expected = routes_of(decoder, fed)
        assert returned.shape == expected.shape
        assert (np.sort(returned) == np.sort(expected)).mean() > 0.98
