"""What only vLLM has: its process, its drafters, its number formats, its versions."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config import Run
from asyncrl.config.drafter import Adaptive, DrafterSettings, Eagle3Drafter, NgramDrafter, NoDrafter, Strategy
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm import build
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.system import minimum_versions
from asyncrl.system.devices import has_avx512, has_gpu
from asyncrl.types import EngineStats, SpeculationArm
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from pipelines.plan import plan
from tests.support.driving import (
    LONG,
    Answer,
    ask,
    child_processes,
    collect,
    collect_all,
    publishing,
    serving,
    until_generated,
)
from tests.support.parity import gathered, reference_logits
from tests.support.real_vllm import TINY, needs_vllm
from tests.support.tiny_model import tiny_checkpoint, tiny_eagle3

pytestmark = pytest.mark.timeout(300)
REPEATING = (7, 8, 9, 10) * 6


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "none is installed: pip install 'asyncrl[vllm]'"),
        ("0.25.1", "0.25.1 is too old: pip install 'asyncrl[vllm]'"),
        ("0.30.0", "0.30.0 is too new: pip install 'asyncrl[vllm]'"),
        ("1.0.0", "too new"),
    ],
)
def test_a_vllm_that_does_not_fit_is_named_with_the_command_that_mends_it(found: str | None, words: str) -> None:
    assert words in str(minimum_versions.vllm_problem(found))


@pytest.mark.parametrize("found", ["0.26.0", "0.27.1", "0.29.0+cpu", "0.29.1rc1"])
def test_supported_versions_have_no_problem(found: str) -> None:
    assert minimum_versions.vllm_problem(found) is None


@needs_vllm
def test_a_dead_engine_process_reaches_every_waiting_iterator(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)

    async def scenario() -> None:
        before = child_processes()
        async with serving(build_vllm(tmp_path, TINY, NoDrafter(), name="vllm")) as engine:
            tasks = [asyncio.create_task(collect(engine, ask(str(i), max_tokens=400))) for i in range(4)]
            await until_generated(engine, 5)
            for process in child_processes() - before:
                os.kill(process, signal.SIGKILL)
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
            assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
            assert "engine vllm is dead" in str(outcomes[0])
            with pytest.raises(EngineError, match="is dead"):
                engine.submit(ask("late"))

    asyncio.run(scenario())


@needs_vllm
@pytest.mark.nightly
def test_the_next_turn_of_a_conversation_finds_the_turns_before_it(tmp_path: Path) -> None:
    """Until the weights change."""
    tiny_checkpoint(tmp_path)
    prompt = LONG[:100]

    async def scenario() -> None:
        with publishing(tmp_path) as publish:
            async with serving(build_vllm(tmp_path, TINY, NoDrafter(), name="vllm")) as engine:
                assert engine.stats().kv_tokens > 0
                first = await collect(engine, ask("1", prompt, max_tokens=40))
                assert (engine.stats().prefilled_tokens, engine.stats().cached_tokens) == (100, 0)
                second = (*prompt, *first.tokens.tolist(), 7, 8, 9)
                await collect(engine, ask("2", second))
                found = engine.stats()
                assert 100 <= found.cached_tokens < 140, "whole blocks"
                assert found.prefilled_tokens + found.cached_tokens == 100 + len(second)
                await engine.load_weights(publish(1), "keep")
                await collect(engine, ask("3", second))
                assert engine.stats().cached_tokens == found.cached_tokens

    asyncio.run(scenario())


def _check_greedy(reference: PreTrainedModel, prompt: tuple[int, ...], answer: Answer) -> None:
    """Every token is the likeliest one, and its log-probability the target's, whoever drafted it."""
    logits = reference_logits(reference, ask("x", prompt), answer)
    assert answer.tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(answer.logprobs, gathered(logits, answer.tokens), atol=1e-3)


def _speculate(path: Path, drafter: DrafterSettings, head: dict[str, torch.Tensor] | None = None) -> None:
    """Answer greedily, perhaps with a new drafting head in between; answers never depend on the drafter."""
    reference = tiny_checkpoint(path)
    prompts = (REPEATING, LONG[:20], LONG[:60])

    async def scenario() -> None:
        async with serving(build_vllm(path, TINY, drafter, name="vllm")) as engine:
            requests = [ask(str(i), p, temperature=0.0, max_tokens=60) for i, p in enumerate(prompts)]
            for prompt, answer in zip(prompts, await collect_all(engine, requests), strict=True):
                _check_greedy(reference, prompt, answer)
            stats = engine.stats()
            assert stats.drafts > 0
            assert 0 < stats.drafted_tokens <= 3 * stats.drafts
            assert len(stats.accepted_by_position) == 3
            assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
            if head is None:
                return
            writer = SharedMemoryWriter(head.items, prefix="test")
            running = asyncio.create_task(collect(engine, ask("over", LONG[:20], temperature=0.0, max_tokens=200)))
            await until_generated(engine, 20, since=stats.generated_tokens)
            manifest = writer.publish(7)
            ack = await engine.load_drafter(manifest)  # type: ignore[attr-defined]
            writer.close()
            assert (ack.version, ack.digest) == (7, manifest.digest)
            answer = await running
            assert answer.versions == [0], "a new drafter is no new policy"
            _check_greedy(reference, LONG[:20], answer)

    asyncio.run(scenario())


@pytest.mark.slow
@needs_vllm
def test_ngram_drafts_change_no_answer(tmp_path: Path) -> None:
    _speculate(tmp_path, NgramDrafter(tokens=3, adaptive=Adaptive(on=False)))


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("drafts", [pytest.param("ngram", marks=pytest.mark.nightly), "eagle3"])
def test_the_bandit_tries_every_depth_and_changes_no_answer(tmp_path: Path, drafts: str) -> None:
    reference = tiny_checkpoint(tmp_path / "target")
    tiny_eagle3(tmp_path / "head")
    adaptive = Adaptive(ranges=(1, 3), strategies=(Strategy(depth=1), Strategy(depth=3)))
    ngram = NgramDrafter(tokens=3, adaptive=adaptive)
    drafter = ngram if drafts == "ngram" else Eagle3Drafter(path=str(tmp_path / "head"), tokens=3, adaptive=adaptive)
    prompts = (REPEATING, LONG[:20], LONG[:60])

    async def scenario() -> None:
        async with serving(build_vllm(tmp_path / "target", TINY, drafter, name="vllm")) as engine:
            for round in range(3):
                requests = [ask(f"{round}/{i}", p, temperature=0.0, max_tokens=100) for i, p in enumerate(prompts)]
                for prompt, answer in zip(prompts, await collect_all(engine, requests), strict=True):
                    _check_greedy(reference, prompt, answer)
            stats = await _measured(engine)
            assert {arm.depth for arm in stats.speculation if arm.batch == 3} == {0, 1, 3}
            assert all(arm.verify == arm.depth and arm.tokens_per_second > 0 for arm in stats.speculation)
            assert 0 < sum(arm.steps for arm in stats.speculation) < stats.steps
            running = asyncio.create_task(collect(engine, ask("order", LONG[:20], temperature=0.0, max_tokens=400)))
            await engine.force_depth(0)  # type: ignore[attr-defined]
            await running
            before = engine.stats().drafted_tokens
            await collect(engine, ask("plain", REPEATING, temperature=0.0, max_tokens=50))
            assert engine.stats().drafted_tokens == before, "no drafts when none are wanted"
            after = build_vllm(tmp_path / "target", TINY, drafter, name="after", learned=engine.learned())
            assert after.stats().speculation == (), "its bandit says what it measured when it is there"
            assert _begun(after) == engine.stats().speculation
            await after.close()

    asyncio.run(scenario())


def _begun(engine: Engine) -> tuple[SpeculationArm, ...]:
    """What the bandit knows that would be made in vLLM's process."""
    from asyncrl.engines.vllm.scheduler import Meter

    speculation = engine._speculation  # type: ignore[attr-defined]
    return Meter(speculation)._bandit.report()  # pyright: ignore[reportPrivateUsage]


async def _measured(engine: Engine) -> EngineStats:
    """Figures are written down now and then, while the engine works."""
    for index in range(20):
        if len(engine.stats().speculation) >= 3:
            break
        await collect_all(engine, [ask(f"more/{index}/{i}", LONG[:20], max_tokens=100) for i in range(3)])
    return engine.stats()


@pytest.mark.slow
@needs_vllm
def test_an_eagle3_head_can_be_replaced_while_answers_run(tmp_path: Path) -> None:
    tiny_eagle3(tmp_path / "head")
    drafter = Eagle3Drafter(path=str(tmp_path / "head"), tokens=3, by_batch=((1, 8, 3), (9, 64, 1)))
    _speculate(tmp_path / "target", drafter, tiny_eagle3(tmp_path / "other", seed=1))


@pytest.mark.slow
@needs_vllm
def test_an_engine_that_cannot_load_a_head_serves_on_and_loads_the_next(tmp_path: Path) -> None:
    """The head fits in part; a head that fits and weights of the policy come after it."""
    reference = tiny_checkpoint(tmp_path / "target")
    head = tiny_eagle3(tmp_path / "head")
    narrow = {name: tensor[:, :-1].clone() if name == "lm_head.weight" else tensor for name, tensor in head.items()}
    drafter = Eagle3Drafter(path=str(tmp_path / "head"), tokens=3, adaptive=Adaptive(on=False))

    async def scenario() -> None:
        async with serving(build_vllm(tmp_path / "target", TINY, drafter, name="vllm")) as engine:
            writer = SharedMemoryWriter(narrow.items, prefix="test")
            await collect(engine, ask("first", LONG[:20], temperature=0.0, max_tokens=10))
            running = asyncio.create_task(collect(engine, ask("over", LONG[:20], temperature=0.0, max_tokens=200)))
            await until_generated(engine, 20)
            with pytest.raises(WeightSyncError, match=r"head 1 was not loaded.*goes on with the one that it has"):
                await engine.load_drafter(writer.publish(1))  # type: ignore[attr-defined]
            writer.close()
            _check_greedy(reference, LONG[:20], await asyncio.wait_for(running, 60))
            whole = SharedMemoryWriter(head.items, prefix="test")
            assert (await engine.load_drafter(whole.publish(2))).version == 2  # type: ignore[attr-defined]
            whole.close()
            policy = SharedMemoryWriter(lambda: reference.state_dict().items(), prefix="test")
            assert (await engine.load_weights(policy.publish(3), "keep")).version == 3
            policy.close()
            answer = await collect(engine, ask("after", REPEATING, temperature=0.0, max_tokens=60))
            _check_greedy(reference, REPEATING, answer)

    asyncio.run(scenario())


@pytest.mark.slow
@needs_vllm
@pytest.mark.skipif(not has_gpu() and not has_avx512(), reason="needs a GPU or a CPU with AVX-512: make test-gpu")
def test_an_fp8_cache_answers_nearly_the_same(tmp_path: Path) -> None:
    reference = tiny_checkpoint(tmp_path)
    settings = msgspec.structs.replace(TINY, kv_dtype="fp8")

    async def scenario() -> Answer:
        async with serving(build_vllm(tmp_path, settings, NoDrafter(), name="vllm")) as engine:
            return await collect(engine, ask("a", LONG, max_tokens=60))

    answer = asyncio.run(scenario())
    expected = gathered(reference_logits(reference, ask("a", LONG), answer), answer.tokens)
    gap = np.abs(answer.logprobs - expected)
    assert 1e-4 < gap.mean() < 0.3, "eight bits show, and do no more than that"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (VllmEngine(quantization="fp8"), "engine.quantization=fp8 needs a GPU, and there is none here"),
        (VllmEngine(kv_dtype="fp8"), "engine.kv_dtype=fp8 needs a GPU or an x86 CPU with AVX-512"),
        (VllmEngine(tensor_parallel=2), "engine.tensor_parallel=2 needs as many GPUs"),
        (VllmEngine(attention="FLASHINFER"), "engine.attention=FLASHINFER needs a GPU, and there is none here"),
        (VllmEngine(attention="ASYNCRL"), "engine.attention=ASYNCRL needs a GPU, and there is none here; use engine."),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    settings: VllmEngine, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "has_gpu", lambda: False)
    monkeypatch.setattr(build, "has_avx512", lambda: False)
    assert any(words in found for found in plan.problems(Run(root=str(tmp_path), engine=settings)))


@needs_vllm
@pytest.mark.parametrize("name", ["auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_kernels_of_attention_are_vllms_by_name(name: Any, tmp_path: Path) -> None:
    from asyncrl.engines.vllm.options import engine_args

    tiny_checkpoint(tmp_path)
    chosen = engine_args(tmp_path, VllmEngine(attention=name), NoDrafter(), "bf16").attention_backend
    assert (chosen.name if chosen else "auto") == name


def test_drafts_for_sampled_answers_are_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(root=str(tmp_path), engine=VllmEngine(), drafter=NgramDrafter())
    words = "drafter=ngram with engine=vllm needs a GPU"
    monkeypatch.setattr(build, "has_gpu", lambda: False)
    assert any(words in found for found in plan.problems(run))
    greedy = msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, temperature=0.0))
    assert not any(words in found for found in plan.problems(greedy))
