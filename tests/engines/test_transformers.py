"""The engine over transformers: every family as transformers itself computes it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from asyncrl.config import Run
from asyncrl.config.engine import TransformersEngine as Settings
from asyncrl.config.run import Rollout
from asyncrl.engines import registry
from asyncrl.engines.transformers.engine import TransformersEngine
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.system import minimum_versions
from asyncrl.types import EngineStats, Request
from tests.support.driving import (
    LONG,
    PROMPT,
    Answer,
    ask,
    collect,
    collect_all,
    publishing_files,
    serving,
    transformers,
    until_generated,
)
from tests.support.families import FAMILIES, family_checkpoint
from tests.support.parity import behaviour, gathered, reference_logits, stepped_logits
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(300)
EXACT = 1e-5
"""Largest difference of fp32 log-probabilities, absolute and relative: the order of sums is the CPU's."""
DELTA_NETS, STEPPED, WHOLE = ("qwen3_next", "qwen3_5"), 1e-4, 1e-3
"""Gated delta nets with random weights make rounding larger: of single tokens by as much as the first number, and of a
whole sequence, which is computed in chunks by other sums, by the second."""
FAST = ("gemma3", "qwen3_moe")
EVERY_FAMILY = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


def _greedy(model: PreTrainedModel, request: Request) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=request.sampling.max_tokens, pad_token_id=0)
    prompt = torch.tensor([request.tokens])
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    return whole[0, len(request.tokens) :].tolist()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_is_exact(family: str, tmp_path: Path) -> None:
    """Greedy as `generate`; log-probabilities as those of the whole sequence, of samples that share forwards and end
    one after the other, and of new weights from an update in mid-answer on."""
    models = [family_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1)]
    greedy = [ask("greedy", max_tokens=30, temperature=0.0), ask("long", LONG[:40], max_tokens=10, temperature=0.0)]
    sampled = [ask(str(seed), seed=seed, max_tokens=8 + 9 * seed) for seed in range(4)]
    updated = [ask(f"updated{seed}", seed=seed, max_tokens=30) for seed in range(2)]

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with serving(transformers(tmp_path / "0")) as engine:
            before = await collect_all(engine, [*greedy, *sampled])
            began = engine.stats().generated_tokens
            running = asyncio.create_task(collect_all(engine, updated))
            await until_generated(engine, 20, since=began)
            with publishing_files(tmp_path / "1") as publish:
                await engine.load_weights(publish(1), "recompute")
            return before, await running

    before, after = asyncio.run(run())
    exact = WHOLE if family in DELTA_NETS else EXACT
    for request, answer in zip(greedy, before, strict=False):
        assert answer.tokens.tolist() == _greedy(models[0], request)
    for request, answer in zip([*greedy, *sampled], before, strict=True):
        expected = gathered(reference_logits(models[0], request, answer), answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=exact, atol=exact)
    if family in DELTA_NETS:
        expected = gathered(stepped_logits(models[0], sampled[-1], before[-1]), before[-1].tokens)
        np.testing.assert_allclose(before[-1].logprobs, expected, rtol=0, atol=STEPPED)
    for answer in after:
        assert answer.versions == [0, 1]
        expected = behaviour(dict(enumerate(models)), PROMPT, answer, "recompute")
        np.testing.assert_allclose(answer.logprobs, expected, rtol=exact, atol=exact)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_old_keys_of_a_sliding_window_stay(family: str, tmp_path: Path) -> None:
    models = [family_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1)]

    async def run() -> Answer:
        async with serving(transformers(tmp_path / "0")) as engine:
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=40)))
            await until_generated(engine, 15)
            with publishing_files(tmp_path / "1") as publish:
                await engine.load_weights(publish(1), "keep")
            return await running

    answer = asyncio.run(run())
    expected = behaviour(dict(enumerate(models)), PROMPT, answer, "keep")
    np.testing.assert_allclose(answer.logprobs, expected, rtol=EXACT, atol=EXACT)


def _stats(path: Path, requests: Sequence[Request], **settings: Any) -> EngineStats:
    async def run() -> EngineStats:
        async with serving(transformers(path, **settings)) as engine:
            await collect_all(engine, list(requests))
            return engine.stats()

    return asyncio.run(run())


def test_samples_of_a_prompt_share_its_computation_and_their_steps(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    alike = [ask(str(seed), seed=seed, max_tokens=10) for seed in range(6)]
    stats = _stats(tmp_path, alike, max_batch=4)
    assert (stats.generated_tokens, stats.prefilled_tokens) == (60, 2 * (len(PROMPT) - 1))
    assert stats.steps == 20, "four samples, and then the other two"
    other = ask("other", LONG[:9], max_tokens=5)
    stats = _stats(tmp_path, [other, *alike[:4]], max_batch=4)
    assert stats.steps == 15, "four samples wait for four places rather than to be decoded apart"


def test_recomputed_completions_go_into_forwards_of_a_limited_size(tmp_path: Path) -> None:
    models = [tiny_checkpoint(tmp_path / str(seed), seed=seed) for seed in (0, 1)]

    async def run() -> tuple[list[Answer], EngineStats]:
        async with serving(transformers(tmp_path / "0", prefill_chunk=40)) as engine:
            running = asyncio.create_task(
                collect_all(engine, [ask(str(seed), seed=seed, max_tokens=20) for seed in range(4)])
            )
            await until_generated(engine, 32)
            with publishing_files(tmp_path / "1") as publish:
                ack = await engine.load_weights(publish(1), "recompute")
            assert ack.reprefilled_tokens == engine.stats().reprefilled_tokens > 0
            return await running, engine.stats()

    answers, stats = asyncio.run(run())
    assert stats.steps > 24, "in two parts from then on"
    for answer in answers:
        expected = behaviour(dict(enumerate(models)), PROMPT, answer, "recompute")
        np.testing.assert_allclose(answer.logprobs, expected, rtol=EXACT, atol=EXACT)


def test_a_version_of_another_model_leaves_the_old_weights(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "0")
    tiny_checkpoint(tmp_path / "wider", intermediate_size=96)
    tiny_checkpoint(tmp_path / "deeper", num_hidden_layers=3)
    tiny_checkpoint(tmp_path / "flatter", num_hidden_layers=1)

    async def run() -> None:
        async with serving(transformers(tmp_path / "0")) as engine:
            before = await collect(engine, ask("before"))
            for other, said in {"wider": "another shape", "deeper": "unexpected", "flatter": "missing"}.items():
                with publishing_files(tmp_path / other) as publish, pytest.raises(WeightSyncError, match=said):
                    await engine.load_weights(publish(1), "keep")
            after = await collect(engine, ask("after"))
            assert after.versions == [0]
            assert after.logprobs.tolist() == before.logprobs.tolist()

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16
def test_logits_are_fp32_in_bf16(tmp_path: Path) -> None:
    """Rounded to bf16 they would be multiples of 1/16, and so would their differences."""
    model = tiny_checkpoint(tmp_path).to(torch.bfloat16)
    request = ask("a", max_tokens=40)

    async def run() -> Answer:
        made = TransformersEngine(tmp_path, Settings(), name="bf16", dtype=torch.bfloat16)
        async with serving(made) as engine:
            return await collect(engine, request)

    answer = asyncio.run(run())
    whole = torch.tensor([[*request.tokens, *answer.tokens.tolist()]])
    hidden = model.model(whole).last_hidden_state[0, len(PROMPT) - 1 : -1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().t()
    gap = np.abs(answer.logprobs - gathered(logits, answer.tokens))
    assert np.median(gap) < 0.02


def _started(path: Path, **settings: Any) -> None:
    async def run() -> None:
        async with serving(transformers(path, **settings)):
            pass

    asyncio.run(run())


def test_a_rope_that_changes_with_the_length_limits_it(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope |= {"original_max_position_embeddings": 64}
    family_checkpoint(tmp_path, "phi3", head_dim=8, rope_parameters=longrope, original_max_position_embeddings=64)
    with pytest.raises(EngineError, match=r"rope_type=longrope .* more than 64 tokens .* set engine.max_length=64"):
        _started(tmp_path)
    _started(tmp_path, max_length=64)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(EngineError, match=r"quantization_config is set.* use a checkpoint in fp32, fp16 or bf16"):
        _started(tmp_path)


def test_an_answer_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    family_checkpoint(tmp_path, "gpt2", n_positions=20)

    async def run() -> Answer:
        async with serving(transformers(tmp_path)) as engine:
            with pytest.raises(EngineError, match=r"engine\.max_length=20"):
                engine.submit(ask("long", LONG[:20]))
            return await collect(engine, ask("a", max_tokens=50))

    answer = asyncio.run(run())
    assert (answer.finish, len(answer.tokens)) == ("length", 20 - len(PROMPT))


def test_it_is_built_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    run = Run(engine=Settings(max_batch=3, device="cpu"), rollout=Rollout(precision="bf16"))
    assert isinstance(registry.build_engine(run, tmp_path, name="built"), TransformersEngine)
    assert list(registry.problems(run)) == []

    def missing(name: str) -> str:
        raise minimum_versions.PackageNotFoundError(name)

    monkeypatch.setattr(minimum_versions, "version", missing)
    assert list(registry.problems(run)) == [
        "transformers 5 is needed here and none is installed: pip install 'asyncrl[transformers]'"
    ]
