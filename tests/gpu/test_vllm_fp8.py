"""vLLM in FP8 on a card, in captured graphs: versions come with their scales, and answers are the model's."""

import asyncio
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedModel

from asyncrl.config.drafter import NoDrafter
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.errors import WeightSyncError
from asyncrl.system.devices import has_gpu
from asyncrl.types import WeightManifest
from tests.support import needs
from tests.support.driving import LONG, ask, collect, collect_all, serving, until_generated
from tests.support.fp8_publishing import publishing
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import TINY, needs_vllm
from tests.support.tiny_model import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    needs_vllm,
    pytest.mark.skipif(not has_gpu(), reason=needs.GPU),
    pytest.mark.timeout(600),
]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}
PROMPTS = [LONG[:20], LONG[:60], LONG[30:90]]
GROWN = 128.0
"""Of values, and what follows them shrinks by as much: the same model, but its cache overflows with the old scales."""


async def gap(engine: Engine, reference: PreTrainedModel, label: str) -> float:
    """Mean distance of the log-probabilities of answers to the model's in fp32."""
    asked = [ask(f"{label}{i}", prompt, max_tokens=100) for i, prompt in enumerate(PROMPTS)]
    gaps: list[float] = []
    for request, answer in zip(asked, await collect_all(engine, asked), strict=True):
        expected = gathered(reference_logits(reference, request, answer), answer.tokens)
        gaps += np.abs(answer.logprobs - expected).tolist()
    return float(np.mean(gaps))


async def update_over_an_answer(engine: Engine, manifest: WeightManifest) -> int:
    """Tokens that were computed again for an answer that was running."""
    began = engine.stats().generated_tokens
    running = asyncio.create_task(collect(engine, ask(f"over{manifest.version}", LONG[:20], max_tokens=1800)))
    await until_generated(engine, 20, since=began)
    ack = await engine.load_weights(manifest, "keep")
    assert (await running).versions == [manifest.version - 1, manifest.version]
    return ack.reprefilled_tokens


@pytest.mark.parametrize("quantization", ["none", "fp8_per_block"])
def test_a_version_is_served_with_its_own_scales(
    quantization: Literal["none", "fp8_per_block"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tiny_checkpoint(tmp_path / "model", **SHAPE)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    settings = msgspec.structs.replace(TINY, max_length=2048, eager=False, quantization=quantization)
    built = build_vllm(tmp_path / "model", settings, NoDrafter(), name="vllm", precision="fp8_full")

    async def scenario() -> None:
        async with serving(built) as engine:
            before = await gap(engine, reference, "before")
            publisher.fp8.see(np.array([LONG] * 4, np.int32))
            publisher.grow(GROWN)
            publisher.grow(1 / GROWN, "o_proj")
            assert await update_over_an_answer(engine, publisher.publish(1)) > 0, "keys under other scales"
            grown = await gap(engine, reference, "grown")
            assert 1e-3 < grown < 1.5 * before, (before, grown)
            assert await update_over_an_answer(engine, publisher.publish(2)) == 0, "the same scales"
            same = publisher.publish(3)
            assert same.fp8 is not None
            fewer = msgspec.structs.replace(same.fp8, quantized=same.fp8.quantized[1:])
            with pytest.raises(WeightSyncError, match=r"do not quantize the same layers.*version 2 is kept"):
                await engine.load_weights(msgspec.structs.replace(same, fp8=fewer), "keep")
            ones = msgspec.structs.replace(same.fp8, kv_scales=((1.0, 1.0, 1.0),) * SHAPE["num_hidden_layers"])
            await engine.load_weights(msgspec.structs.replace(same, fp8=ones), "keep")
            overflowing = await gap(engine, reference, "overflowing")
            print(f"{quantization}: {before:.3f} before, {grown:.3f} grown, {overflowing:.3f} with scales of 1")
            assert overflowing > 2 * grown, (grown, overflowing)

    with publishing(tmp_path / "model", "fp8_full", engine=settings) as publisher:
        asyncio.run(scenario())
