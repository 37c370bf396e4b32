"""The native engine against transformers: the same tokens, the same log-probabilities."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from tests.support.driving import LONG, Answer, ask, collect, collect_all, native, publishing, serving, until_generated
from tests.support.parity import gathered, reference_logits
from tests.support.tiny_model import FAMILIES, tiny_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of one token to beyond the first cache length, in chunks, with more requests than rows."""
    reference = tiny_checkpoint(tmp_path, family)
    prompts = [LONG[: 1 + 13 * i] for i in range(12)]

    async def run() -> list[Answer]:
        async with serving(native(tmp_path, max_batch=9, prefill_chunk=32)) as engine:
            requests = [ask(str(i), p, temperature=0.0, max_tokens=8 + i) for i, p in enumerate(prompts)]
            return await collect_all(engine, requests)

    for index, (prompt, answer) in enumerate(zip(prompts, asyncio.run(run()), strict=True)):
        config = GenerationConfig(do_sample=False, max_new_tokens=8 + index, pad_token_id=0)
        everything = torch.ones(1, len(prompt))  # without it transformers hides prompt tokens that equal the padding
        theirs = reference.generate(torch.tensor([prompt]), attention_mask=everything, generation_config=config)
        assert answer.tokens.tolist() == theirs[0, len(prompt) :].tolist()
        logits = reference_logits(reference, ask("x", prompt), answer)
        np.testing.assert_allclose(answer.logprobs, gathered(logits, answer.tokens), atol=1e-4)


def test_a_shared_prompt_is_prefilled_once(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    requests = [ask(str(i), LONG, seed=i) for i in range(8)]

    async def run() -> tuple[list[Answer], list[Answer], int]:
        async with serving(native(tmp_path, prefill_chunk=64)) as engine:
            shared = await collect_all(engine, requests)
            prefilled = engine.stats().prefilled_tokens
            return shared, [await collect(engine, request) for request in requests], prefilled

    shared, alone, prefilled = asyncio.run(run())
    assert len(LONG) - 1 <= prefilled < 1.5 * len(LONG)
    for one, other in zip(shared, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "qwen3")
    tiny_checkpoint(tmp_path / "wide", intermediate_size=128)

    async def run() -> None:
        async with serving(native(tmp_path / "qwen3")) as engine:
            with (
                publishing(tmp_path / "wide") as publish,
                pytest.raises(WeightSyncError, match=r"another model, differing in model\.layers\.0\.mlp\.down_proj"),
            ):
                await engine.load_weights(publish(1), "keep")

    asyncio.run(run())


def test_a_failing_step_reaches_every_waiting_iterator(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model, _ = load_model(tmp_path)
    dict(hf_tensors(model))["model.norm.weight"].fill_(float("nan"))
    writer = SharedMemoryWriter(lambda: hf_tensors(model), prefix="test")

    async def run() -> None:
        async with serving(native(tmp_path, max_batch=2)) as engine:
            tasks = [asyncio.create_task(collect(engine, ask(str(i), max_tokens=300))) for i in range(4)]
            await until_generated(engine, 5)
            await engine.load_weights(writer.publish(1), "keep")
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
            assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
            assert "logits are NaN under version 1" in str(outcomes[3])
            with pytest.raises(EngineError, match="failed in step"):
                engine.submit(ask("late"))

    try:
        asyncio.run(run())
    finally:
        writer.close()


def test_prompts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def run() -> None:
        async with serving(native(tmp_path, max_length=20)) as engine:
            with pytest.raises(EngineError, match=r"150 tokens leave no room .* engine\.max_length=20"):
                engine.submit(ask("long", LONG))
            with pytest.raises(EngineError, match=r"token ids must be in 0\.\.47"):
                engine.submit(ask("strange", (48,)))
            answer = await collect(engine, ask("fits", LONG[:15], max_tokens=100))
            assert (answer.finish, len(answer.tokens)) == ("length", 5)

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch says so on CPUs without bf16 instructions
def test_bf16_engine_follows_a_bf16_publication(tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path).to(torch.bfloat16)
    model, _ = load_model(tmp_path, torch.bfloat16)
    writer = SharedMemoryWriter(lambda: hf_tensors(model), prefix="test")

    async def run() -> tuple[str, Answer]:
        engine = NativeEngine(tmp_path, native(tmp_path).settings, name="bf16", dtype=torch.bfloat16)
        async with serving(engine):
            ack = await engine.load_weights(manifest, "keep")
            return ack.digest, await collect(engine, ask("a", max_tokens=30))

    try:
        manifest = writer.publish(1)
        digest, answer = asyncio.run(run())
    finally:
        writer.close()
    assert digest == manifest.digest
    expected = gathered(reference_logits(reference, ask("a"), answer).float(), answer.tokens)
    np.testing.assert_allclose(answer.logprobs, expected, atol=0.15)


def test_a_prompt_is_shared_with_requests_that_join_beyond_the_rows_held(tmp_path: Path) -> None:
    """The cache starts with few rows; those that join later copy the prompt into rows that must first be made."""
    model = tiny_checkpoint(tmp_path)

    async def scenario() -> list[Answer]:
        async with serving(native(tmp_path)) as engine:
            first = asyncio.create_task(collect(engine, ask("first", max_tokens=60)))
            await until_generated(engine, 5)
            late = await collect_all(engine, [ask(f"late-{i}", seed=i) for i in range(40)])
            await first
            return late

    for number, answer in enumerate(asyncio.run(scenario())):
        logits = reference_logits(model, ask(f"late-{number}"), answer)
        np.testing.assert_allclose(answer.logprobs, gathered(logits, answer.tokens), atol=1e-4)
