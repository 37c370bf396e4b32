"""The native engine against transformers: the same tokens, the same log-probabilities."""

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrl.engines.base import OnUpdate
from asyncrl.engines.native.engine import NativeEngine
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.types import Request, Sampling, Segment
from asyncrl.weights.shared_memory import SharedMemoryWriter
from tests.engines.driving import (
    PROMPT,
    Answer,
    ask,
    collect,
    collect_all,
    native,
    publishing,
    serving,
    until_generated,
)
from tests.tiny_model import FAMILIES, tiny_checkpoint

LONG = tuple(int(token) for token in np.random.default_rng(1).integers(0, 48, 150))


def gathered(logits_T_V: torch.Tensor, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
    index = torch.as_tensor(np.asarray(tokens), dtype=torch.int64).unsqueeze(1)
    return logits_T_V.log_softmax(-1).gather(1, index).squeeze(1).detach().numpy()


def reference_logits(model: PreTrainedModel, request: Request, answer: Answer) -> torch.Tensor:
    """Logits that transformers gives at each token of the answer."""
    whole = torch.tensor([[*request.tokens, *answer.tokens.tolist()]])
    return model(whole).logits[0, len(request.tokens) - 1 : -1]


def processed(logits_T_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if sampling.temperature not in (0, 1):
        logits_T_V = TemperatureLogitsWarper(sampling.temperature)(ids, logits_T_V)
    if sampling.top_k:
        logits_T_V = TopKLogitsWarper(sampling.top_k)(ids, logits_T_V)
    if sampling.top_p < 1:
        logits_T_V = TopPLogitsWarper(sampling.top_p)(ids, logits_T_V)
    return logits_T_V


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


def test_mixed_settings_report_the_distribution_sampled_from(tmp_path: Path) -> None:
    """Rows of all kinds in one batch: log-probabilities equal transformers' processed ones, tokens are allowed ones."""
    reference = tiny_checkpoint(tmp_path)
    kinds = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.9},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.4, "top_k": 10, "top_p": 0.8},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
    ]
    requests = [ask(str(i), seed=i, max_tokens=40, **kinds[i % len(kinds)]) for i in range(28)]

    async def run() -> list[Answer]:
        async with serving(native(tmp_path)) as engine:
            return await collect_all(engine, requests)

    for request, answer in zip(requests, asyncio.run(run()), strict=True):
        logits = reference_logits(reference, request, answer)
        if request.sampling.temperature > 0:
            logits = processed(logits, request.sampling)
        expected = gathered(logits, answer.tokens)
        assert np.isfinite(expected).all(), "a token outside top-k or top-p was sampled"
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


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


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_updates_use_new_weights_on_old_or_new_keys(on_update: OnUpdate, tmp_path: Path) -> None:
    models = [tiny_checkpoint(tmp_path / str(version), seed=version) for version in range(4)]

    async def run() -> list[Answer]:
        async with serving(native(tmp_path / "0", prefill_chunk=16)) as engine:
            running = asyncio.create_task(collect_all(engine, [ask(str(i), seed=i, max_tokens=60) for i in range(3)]))
            for version in (1, 2, 3):
                await until_generated(engine, 45 * version)
                with publishing(tmp_path / str(version)) as publish:
                    await engine.load_weights(publish(version), on_update)
            return await running

    for answer in asyncio.run(run()):
        assert answer.versions == [0, 1, 2, 3]
        expected = _behaviour(models, answer.segments, on_update)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def _behaviour(models: list[PreTrainedModel], segments: list[Segment], on_update: OnUpdate) -> npt.NDArray[np.float32]:
    """Log-probabilities with one cache through all versions (keep), or with a fresh one per version (recompute)."""
    cache, pending, prefix = DynamicCache(), list(PROMPT), list(PROMPT)
    parts: list[npt.NDArray[np.float32]] = []
    for segment in segments:
        tokens = segment.tokens.tolist()
        if on_update == "recompute":
            cache, pending = DynamicCache(), list(prefix)
        fed = torch.tensor([pending + tokens[:-1]])
        logits = models[segment.version](fed, past_key_values=cache).logits[0, len(pending) - 1 :]
        parts.append(gathered(logits, tokens))
        prefix += tokens
        pending = tokens[-1:]
    return np.concatenate(parts)


def spoil(file: Path) -> None:
    file.write_bytes(b"\1" + file.read_bytes()[1:])


def test_a_wrong_digest_leaves_the_old_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_checkpoint(tmp_path / str(seed), seed=seed)

    async def run() -> None:
        async with serving(native(tmp_path / "0")) as engine:
            before = await collect(engine, ask("before", max_tokens=30))
            with publishing(tmp_path / "1") as publish:
                good = publish(1)
                spoil(Path(good.location))
                with pytest.raises(WeightSyncError, match="version 0 is kept"):
                    await engine.load_weights(good, "keep")
            after = await collect(engine, ask("after", max_tokens=30))
            assert engine.stats().version == 0
            assert after.versions == [0]
            assert after.tokens.tolist() == before.tokens.tolist()
            assert after.logprobs.tolist() == before.logprobs.tolist()

    asyncio.run(run())


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
