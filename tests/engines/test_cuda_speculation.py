"""Speculation in the engine for GPUs, with its kernels in torch: the CPU engine's tokens, and plain decoding's."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.drafter import Eagle3Drafter, EagleDrafter, NgramDrafter, Strategy
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.drafting.checkpoint import head_tensors, save_head
from asyncrl.drafting.heads import Kind
from asyncrl.engines.base import Engine, OnUpdate
from asyncrl.engines.native.cuda.drafting import RING
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.pages import PAGE
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.types import EngineStats, Request
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from tests.engines.test_speculation_drafts import Offline, spoil_file
from tests.support.drafters import FIXED, Switching, drafting, paged_drafting, random_head, save_heads, teach
from tests.support.driving import (
    LONG,
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
from tests.support.parity import behaviour
from tests.support.tiny_model import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and heads beside it."""
    folder = tmp_path_factory.mktemp("speculation")
    tiny_checkpoint(folder / "model", tie_word_embeddings=True)
    save_heads(folder / "model", folder)
    return folder


def served(engine: Engine, requests: list[Request]) -> tuple[list[Answer], EngineStats]:
    async def run() -> tuple[list[Answer], EngineStats]:
        async with serving(engine):
            return await collect_all(engine, requests), engine.stats()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "ngram"])
def test_both_engines_draft_accept_and_replace_the_same(path: Path, kind: str) -> None:
    """Lossless is what the CPU engine was shown to be; here every token is the same, at any temperature."""
    requests = [
        ask(f"{i}", LONG[: 1 + 7 * i % 40], seed=i, max_tokens=4 + 9 * (i % 4), temperature=(1.0, 0.0, 0.7)[i % 3])
        for i in range(18)
    ]
    sizes = {"max_batch": 7, "prefill_chunk": 32, "max_length": 60}
    expected, on_cpu = served(drafting(kind, path)(path / "model", **sizes), requests)
    answers, paged = served(paged_drafting(kind, path)(path / "model", **sizes), requests)
    for answer, one in zip(answers, expected, strict=True):
        assert (answer.finish, answer.tokens.tolist()) == (one.finish, one.tokens.tolist())
        np.testing.assert_allclose(answer.logprobs, one.logprobs, atol=1e-4)
    assert sum(paged.accepted_by_position) > 20
    assert (paged.drafts, paged.drafted_tokens) == (on_cpu.drafts, on_cpu.drafted_tokens)
    assert paged.accepted_by_position == on_cpu.accepted_by_position


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_rows_with_top_k_decode_plainly_beside_others(path: Path, kind: str) -> None:
    restricted = [ask(f"k{i}", LONG[:9], seed=i, max_tokens=20, top_k=3, top_p=0.9) for i in range(3)]
    greedy = [ask(f"g{i}", LONG[: 4 + i], temperature=0.0, max_tokens=20) for i in range(3)]
    expected, _ = served(native(path / "model"), [*restricted, *greedy])
    answers, stats = served(paged_drafting(kind, path)(path / "model"), [*restricted, *greedy])
    for answer, one in zip(answers, expected, strict=True):
        assert answer.tokens.tolist() == one.tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, one.logprobs, atol=1e-4)
    assert 0 < stats.drafts <= 3 * 20, "only of the greedy ones"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_that_paused_drafts_as_if_it_had_not(kind: Kind, tmp_path: Path) -> None:
    """Depth 0 and others in turn, some longer than the ring: each step accepts what the head says of the whole text."""
    tiny_checkpoint(tmp_path / "model")
    model, _ = load_model(tmp_path / "model")
    request = ask("a", LONG[:30], temperature=0.0, max_tokens=150)
    (plain,), _ = served(native(tmp_path / "model"), [request])
    head, tokens = random_head(kind, tmp_path / "model"), plain.tokens.tolist()
    teach(head, model, [[*request.tokens, *tokens]], steps=60)
    save_head(head, tmp_path / "head")
    drafter = (EagleDrafter if kind == "eagle" else Eagle3Drafter)(
        path=str(tmp_path / "head"), tokens=3, adaptive=FIXED
    )
    plans = (
        Strategy(depth=0),
        Strategy(depth=3),
        Strategy(depth=0),
        Strategy(depth=0),
        Strategy(depth=0),
        Strategy(depth=1),
    )
    chooser = Switching(plans, steps=7)
    assert RING < 3 * 7
    engine = CudaEngine(tmp_path / "model", Settings(), drafter, name="paged", device=CPU, chooser=chooser)
    (answer,), stats = served(engine, [request])
    assert answer.tokens.tolist() == tokens
    assert stats.drafts > 10
    offline, done, hits = Offline(head, model), 1, 0
    with torch.no_grad():
        for _, strategy, kept, _ in chooser.recorded:
            text, expected = [*request.tokens, *tokens[:done]], 1
            paths = offline.chain(strategy.depth, request)(text) if strategy.depth else []
            for drafted in paths:
                expected += drafted == tokens[done : done + len(drafted)]
            assert kept == min(expected, len(tokens) - done)
            done, hits = done + kept, hits + kept - 1
    assert done == len(tokens)
    assert hits > 10, "without accepted drafts it says nothing"


@pytest.mark.parametrize(("kind", "pages"), [("eagle3", 5), ("ngram", 5), ("ngram", 100)])
def test_an_engine_short_of_pages_drafts_and_serves_all(path: Path, kind: str, pages: int) -> None:
    """While strategies and rows come and go."""
    lengths = [120, 30, 100, 3, 90, 60, 110, 1, 70, 80]
    requests = [
        ask(f"{i}", LONG[: 1 + 17 * (i % 4)], temperature=0.0, max_tokens=length) for i, length in enumerate(lengths)
    ]
    chooser = Switching((Strategy(depth=4), Strategy(depth=0), Strategy(depth=2)), steps=20)
    make = paged_drafting(kind, path)
    engine = make(path / "model", chooser=chooser, pages=pages, max_batch=6, max_length=4 * PAGE, prefill_chunk=48)
    answers, stats = served(engine, requests)
    expected, _ = served(native(path / "model"), requests)
    for answer, one in zip(answers, expected, strict=True):
        assert answer.tokens.tolist() == one.tokens.tolist()
        np.testing.assert_allclose(answer.logprobs, one.logprobs, atol=1e-3)
    assert stats.generated_tokens == sum(lengths)
    assert stats.drafts > 20
    again = stats.prefilled_tokens + stats.cached_tokens > sum(len(request.tokens) for request in requests)
    assert again == (pages == 5), "rows gave up their pages"


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_in_the_middle_of_drafts(path: Path, on_update: OnUpdate, tmp_path: Path) -> None:
    """What the old weights and their head have drafted is judged by the new ones; depths change meanwhile."""
    models = [tiny_checkpoint(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in range(3)]
    requests = [ask(str(i), seed=i, max_tokens=100) for i in range(3)]
    chooser = Switching((Strategy(depth=4), Strategy(depth=0), Strategy(depth=2)), steps=9)

    async def run() -> list[Answer]:
        engine = paged_drafting("eagle3", path)(tmp_path / "0", chooser=chooser, prefill_chunk=16)
        async with serving(engine):
            running = asyncio.create_task(collect_all(engine, requests))
            for version in (1, 2):
                await until_generated(engine, 90 * version)
                with publishing(tmp_path / str(version)) as publish:
                    await engine.load_weights(publish(version), on_update)
            return await running

    for answer in asyncio.run(run()):
        assert answer.versions == [0, 1, 2]
        assert len(answer.tokens) == 100
        expected = behaviour(dict(enumerate(models)), PROMPT, answer, on_update)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-3)


def test_a_stop_token_or_the_limit_ends_an_accepted_run(path: Path) -> None:
    requests = [ask(f"l{n}", temperature=0.0, max_tokens=n) for n in range(1, 30)]
    (free,), _ = served(native(path / "model"), [ask("free", temperature=0.0, max_tokens=60)])
    tokens = free.tokens.tolist()
    requests += [ask(f"s{t}", temperature=0.0, max_tokens=60, stop=(t,)) for t in sorted(set(tokens))]
    drafter = NgramDrafter(tokens=5, min_match=1, adaptive=FIXED)
    answers, stats = served(CudaEngine(path / "model", Settings(), drafter, name="paged", device=CPU), requests)
    for request, answer in zip(requests, answers, strict=True):
        stop, most = request.sampling.stop, request.sampling.max_tokens
        cut = tokens.index(stop[0]) + 1 if stop else most
        assert (answer.finish, answer.tokens.tolist()) == ("stop" if stop else "length", tokens[:cut])
    assert sum(stats.accepted_by_position) > 100


def test_a_published_head_takes_over_and_a_spoiled_one_does_not(path: Path, tmp_path: Path) -> None:
    heads = [random_head("eagle3", path / "model", seed=seed, vocabulary=24) for seed in (0, 1)]
    heads[1].drafts_U = torch.arange(24, 48)
    for index, head in enumerate(heads):
        save_head(head, tmp_path / str(index))
    writer = SharedMemoryWriter(lambda: head_tensors(heads[1]), prefix="test")
    requests = [ask(str(i), LONG[: 5 + i], temperature=0.0, max_tokens=30) for i in range(6)]

    async def acceptance(head: int, *, update: bool = False, spoil: bool = False) -> tuple[int, ...]:
        drafter = Eagle3Drafter(path=str(tmp_path / str(head)), tokens=3, adaptive=FIXED)
        async with serving(CudaEngine(path / "model", Settings(), drafter, name="paged", device=CPU)) as engine:
            manifest = writer.publish(4)
            if spoil:
                spoil_file(Path(manifest.location))
                with pytest.raises(WeightSyncError, match="drafter 0 is kept"):
                    await engine.load_drafter(manifest)
            if update:
                ack = await engine.load_drafter(manifest)
                assert (ack.version, ack.digest) == (4, manifest.digest)
            await collect_all(engine, requests)
            assert engine.stats().version == 0, "the policy's version stays"
            return engine.stats().accepted_by_position

    try:
        old, new = asyncio.run(acceptance(0)), asyncio.run(acceptance(1))
        assert old != new
        assert asyncio.run(acceptance(0, update=True)) == new
        assert asyncio.run(acceptance(0, spoil=True)) == old
    finally:
        writer.close()


def test_the_bandit_measures_and_a_depth_can_be_forced(path: Path) -> None:
    drafter = Eagle3Drafter(path=str(path / "eagle3"), tokens=2)

    async def run() -> None:
        engine = CudaEngine(path / "model", Settings(), drafter, name="paged", device=CPU)
        async with serving(engine):
            await collect(engine, ask("a", temperature=0.0, max_tokens=160))
            arms = engine.stats().speculation
            assert {arm.depth for arm in arms} == {0, 1, 2}
            assert all(arm.batch == 1 and arm.tokens_per_second > 0 for arm in arms)
            before = engine.stats().drafts
            await engine.force_depth(0)
            await collect(engine, ask("b", temperature=0.0, max_tokens=20))
            assert engine.stats().drafts <= before + 1

    asyncio.run(run())


def test_trees_stay_on_the_cpu(path: Path) -> None:
    drafter = Eagle3Drafter(tokens=3, top_k=3, verify=9)
    with pytest.raises(EngineError, match=r"no trees; use drafter\.top_k=1"):
        CudaEngine(path / "model", Settings(), drafter, name="paged", device=CPU)
    assert not Settings(device="auto").on_gpu(drafter, found=True)
