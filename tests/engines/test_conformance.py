"""What every engine promises, whatever is inside."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncrl.engines.base import OnUpdate
from asyncrl.errors import EngineError
from asyncrl.types import WeightManifest
from tests.engines.driving import (
    PROMPT,
    Answer,
    MakeEngine,
    ask,
    collect,
    collect_all,
    fake,
    native,
    publishing,
    serving,
    until_generated,
)
from tests.tiny_model import tiny_checkpoint

Publish = Callable[[int], WeightManifest]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


@pytest.fixture(params=[native, fake])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    return request.param


def test_answers_are_fixed_by_their_seed_not_by_their_company(make: MakeEngine, path: Path) -> None:
    requests = [ask(f"r{i}", PROMPT[: 2 + i % 5], seed=i, max_tokens=5 + 7 * (i % 4)) for i in range(24)]

    async def together(max_batch: int) -> list[Answer]:
        async with serving(make(path, max_batch=max_batch, prefill_chunk=3 + max_batch)) as engine:
            return await collect_all(engine, requests)

    async def alone() -> list[Answer]:
        async with serving(make(path)) as engine:
            return [await collect(engine, request) for request in requests]

    reference = asyncio.run(alone())
    assert len({answer.tokens.tobytes() for answer in reference}) > 20
    for max_batch in (1, 5, 64):
        for answer, expected in zip(asyncio.run(together(max_batch)), reference, strict=True):
            assert answer.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
            assert answer.finish == expected.finish


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_each_update_opens_a_segment(make: MakeEngine, path: Path, on_update: OnUpdate) -> None:
    async def scenario(publish: Publish) -> None:
        async with serving(make(path)) as engine:
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=40)))
            for version in (1, 2, 3):
                await until_generated(engine, 8 * version)
                before = engine.stats()
                ack = await engine.load_weights(publish(version), on_update)
                assert (ack.version, ack.digest) == (version, publish(version).digest)
                expected = len(PROMPT) + before.generated_tokens if on_update == "recompute" else 0
                assert abs(ack.reprefilled_tokens - expected) <= 1, "all but perhaps the newest token"
            answer = await running
            assert answer.versions == [0, 1, 2, 3]
            assert all(len(segment) >= 7 for segment in answer.segments)
            assert len(answer.tokens) == 40
            assert engine.stats().version == 3

    with publishing(path) as publish:
        asyncio.run(scenario(publish))


def test_nothing_is_lost_or_doubled_under_updates(make: MakeEngine, path: Path) -> None:
    """The same weights under new versions must not change a single token of 200 uneven answers."""
    lengths = np.random.default_rng(0).geometric(0.06, 200).clip(1, 90)
    requests = [ask(f"r{i}", PROMPT[: 1 + i % 7], seed=i, max_tokens=int(n)) for i, n in enumerate(lengths)]

    async def run(updates: int, publish: Publish) -> list[Answer]:
        async with serving(make(path, max_batch=32, prefill_chunk=16)) as engine:
            running = asyncio.create_task(collect_all(engine, requests))
            for version in range(1, updates + 1):
                await until_generated(engine, version * int(lengths.sum()) // (updates + 2))
                await engine.load_weights(publish(version), "keep" if version % 2 else "recompute")
            answers = await running
            assert engine.stats().generated_tokens == lengths.sum()
            assert engine.stats().running == engine.stats().waiting == 0
            return answers

    with publishing(path) as publish:
        quiet, busy = asyncio.run(run(0, publish)), asyncio.run(run(6, publish))
    for answer, expected, length in zip(busy, quiet, lengths, strict=True):
        assert len(answer.tokens) == length
        assert answer.tokens.tolist() == expected.tokens.tolist()
        assert answer.versions == sorted(set(answer.versions))
    assert max(len(answer.segments) for answer in busy) >= 3
    assert {version for answer in busy for version in answer.versions} == set(range(7))


def test_pause_takes_no_step(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        async with serving(make(path)) as engine:
            running = asyncio.create_task(collect(engine, ask("a", max_tokens=30)))
            await until_generated(engine, 5)
            await engine.pause()
            before = engine.stats()
            late = asyncio.create_task(collect(engine, ask("b")))
            for _ in range(50):
                await asyncio.sleep(0)
            assert engine.stats().steps == before.steps
            assert engine.stats().waiting == 1
            await engine.resume()
            assert len((await running).tokens) == 30
            assert len((await late).tokens) == 12

    asyncio.run(scenario())


def test_abort_returns_what_was_sampled_and_frees_the_place(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        async with serving(make(path, max_batch=2)) as engine:
            names = ("a", "b", "c", "d")
            tasks = {name: asyncio.create_task(collect(engine, ask(name, max_tokens=25))) for name in names}
            await until_generated(engine, 10)
            await engine.abort("d")
            await engine.abort("a")
            await engine.abort("nobody")
            aborted, never_ran = await tasks["a"], await tasks["d"]
            assert (aborted.finish, never_ran.finish) == ("abort", "abort")
            assert 0 < len(aborted.tokens) < 25
            assert len(never_ran.tokens) == 0
            for name in ("b", "c"):
                answer = await tasks[name]
                assert (answer.finish, len(answer.tokens)) == ("length", 25)
                assert answer.tokens.tolist()[: len(aborted.tokens)] == aborted.tokens.tolist(), "same seed and prompt"

    asyncio.run(scenario())


def test_a_resumed_answer_goes_on_as_if_never_stopped(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        async with serving(make(path)) as engine:
            whole = await collect(engine, ask("whole", seed=3, max_tokens=30))
            first = tuple(whole.tokens.tolist()[:11])
            rest = await collect(engine, ask("rest", PROMPT + first, seed=3, max_tokens=30, resumed=11))
            assert first + tuple(rest.tokens.tolist()) == tuple(whole.tokens.tolist())
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[11:], atol=1e-4)

    asyncio.run(scenario())


def test_stop_token_ends_the_answer_and_belongs_to_it(path: Path) -> None:
    async def scenario() -> None:
        async with serving(native(path)) as engine:
            free = await collect(engine, ask("free", max_tokens=40))
            stop = int(free.tokens[20])
            at = free.tokens.tolist().index(stop)
            stopped, other = await collect_all(
                engine, [ask("a", max_tokens=40, stop=(stop, 47, 46)), ask("b", max_tokens=40, stop=(99,))]
            )
            assert other.tokens.tolist() == free.tokens.tolist()
            assert stopped.finish == "stop"
            assert stopped.tokens.tolist()[-1] in (stop, 47, 46)
            assert stopped.tokens.tolist() == free.tokens.tolist()[: len(stopped.tokens)]
            assert len(stopped.tokens) <= at + 1

    asyncio.run(scenario())


def test_a_consumer_that_leaves_frees_its_place(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        async with serving(make(path, max_batch=1)) as engine:
            leaving = asyncio.create_task(collect(engine, ask("a", max_tokens=300)))
            await until_generated(engine, 3)
            leaving.cancel()
            await asyncio.wait([leaving])
            assert engine.stats().running == 0
            assert len((await collect(engine, ask("b"))).tokens) == 12

    asyncio.run(scenario())


def test_close_ends_every_iterator_and_leaves_no_task(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        engine = make(path, max_batch=2)
        with pytest.raises(EngineError, match="is not started"):
            engine.submit(ask("early"))
        await engine.start()
        tasks = [asyncio.create_task(collect(engine, ask(str(i), max_tokens=300))) for i in range(5)]
        await until_generated(engine, 6)
        await engine.close()
        await engine.close()
        answers = await asyncio.gather(*tasks)
        assert [answer.finish for answer in answers] == ["abort"] * 5
        assert sum(len(answer.tokens) for answer in answers) >= 6
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(EngineError, match="is closed"):
            engine.submit(ask("late"))
        with publishing(path) as publish, pytest.raises(EngineError, match="is closed"):
            await engine.load_weights(publish(1), "keep")

    asyncio.run(scenario())


def test_requests_that_cannot_be_served_are_refused(make: MakeEngine, path: Path) -> None:
    async def scenario() -> None:
        async with serving(make(path)) as engine:
            running = asyncio.create_task(collect(engine, ask("a")))
            await until_generated(engine, 1)
            with pytest.raises(EngineError, match="request a is already running"):
                engine.submit(ask("a"))
            with pytest.raises(EngineError, match="resumed=7"):
                engine.submit(ask("b", resumed=7))
            with pytest.raises(EngineError, match="max_tokens=3 leave"):
                engine.submit(ask("c", resumed=3, max_tokens=3))
            await running

    asyncio.run(scenario())
