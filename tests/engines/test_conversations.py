"""The next turn of a conversation finds what the turns before it have computed, and is answered as if it had not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.engines.base import Engine
from asyncrl.engines.native.cpu.conversations import Conversations
from asyncrl.engines.native.cuda.pages import PAGE, PageTable
from asyncrl.types import Request
from tests.support.driving import LONG, Answer, ask, collect, collect_all, native, paged, publishing, serving
from tests.support.tiny_model import tiny_checkpoint

SAID = (7, 8, 9, 10, 11)
SHORT = 2 * PAGE + 3
"""Tokens of the first turn's prompt."""
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _turn(name: str, tokens: tuple[int, ...], conversation: str = "talk") -> Request:
    return msgspec.structs.replace(ask(name, tokens, seed=3, max_tokens=80), conversation=conversation)


def _next(prompt: tuple[int, ...], answer: Answer) -> tuple[int, ...]:
    return (*prompt, *answer.tokens.tolist(), *SAID)


def _figures(engine: Engine) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    stats = engine.stats()
    return np.array([stats.prefilled_tokens, stats.cached_tokens])


@pytest.mark.parametrize(("make", "found"), [(native, SHORT + 80 - 1), (paged, PAGE * ((SHORT + 80) // PAGE))])
def test_a_turn_goes_on_from_the_one_before(path: Path, make: MakeEngine, found: int) -> None:
    """What was sampled last is known, but not computed: our CPU engine finds all else, that for GPUs whole pages."""
    prompt = LONG[:SHORT]

    async def run() -> None:
        async with serving(make(path)) as engine, serving(native(path)) as fresh:
            first = await collect(engine, _turn("1", prompt))
            second = _next(prompt, first)
            before = _figures(engine)
            answer = await collect(engine, _turn("2", second))
            assert (_figures(engine) - before).tolist() == [len(second) - 1 - found, found]
            alone = await collect(fresh, _turn("2", second, conversation=""))
            assert answer.tokens.tolist() == alone.tokens.tolist()
            np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-4)
            third = _next(second, answer)
            await collect_all(engine, [_turn("3a", third), _turn("3b", (*second, 1, 2))])
            assert _figures(engine)[1] - before[1] > found + len(second), "both branches go on from where they part"

    asyncio.run(run())


@pytest.mark.parametrize("make", [native, paged])
@pytest.mark.parametrize("during", [False, True])
def test_an_update_forgets_what_was_computed_before_it(
    path: Path, tmp_path: Path, make: MakeEngine, *, during: bool
) -> None:
    """Between two turns, or in the middle of the first: then its keys and values are of two versions."""
    tiny_checkpoint(tmp_path, seed=1)
    prompt = LONG[:SHORT]

    async def run() -> None:
        with publishing(tmp_path) as publish:
            manifest = publish(1)
            async with serving(make(path)) as engine, serving(native(tmp_path)) as fresh:
                if during:
                    answering = asyncio.create_task(collect(engine, _turn("1", prompt)))
                    while not engine.stats().generated_tokens:  # noqa: ASYNC110  (it is counted in this very loop)
                        await asyncio.sleep(0)
                    await engine.load_weights(manifest, "keep")
                    first = await answering
                    assert sorted(set(first.versions)) == [0, 1]
                else:
                    first = await collect(engine, _turn("1", prompt))
                    await engine.load_weights(manifest, "keep")
                second = _next(prompt, first)
                before = _figures(engine)
                answer = await collect(engine, _turn("2", second))
                assert (_figures(engine) - before).tolist() == [len(second) - 1, 0]
                alone = await collect(fresh, _turn("2", second))
                assert answer.tokens.tolist() == alone.tokens.tolist()
                third = _next(second, answer)
                await collect(engine, _turn("3", third))
                assert _figures(engine)[1] > before[1], "the second turn is of one version"

    asyncio.run(run())


def test_a_prompt_with_the_same_beginning_finds_its_pages(path: Path) -> None:
    shared = LONG[: PAGE + 10]

    async def run() -> None:
        async with serving(paged(path)) as engine, serving(native(path)) as fresh:
            await collect(engine, ask("one", (*shared, 1, 2, 3)))
            other = ask("other", (*shared, 4, 5), seed=1)
            answer, alone = await collect(engine, other), await collect(fresh, other)
            assert engine.stats().cached_tokens == PAGE
            assert answer.tokens.tolist() == alone.tokens.tolist()

    asyncio.run(run())


def test_pages_are_found_until_they_are_used_again() -> None:
    text = np.arange(24)
    table = PageTable(rows=2, length=32, pages=4, page=8)
    assert table.reserve(0, 24)
    table.remember(0, text)
    table.release(0)
    assert table.reserve(1, 16), "the page that was never used, and the last one of the text"
    assert table.find(0, text) == 16
    assert table.free == 0
    table.release(0)
    table.release(1)
    table.forget()
    assert table.find(0, text) == 0


def test_conversations_that_have_waited_longest_go_first() -> None:
    def saved(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.full(1, number, np.uint8)

    kept = Conversations()
    kept.keep("a", np.array([1, 2, 3]), saved(1), room=8)
    kept.keep("a", np.array([1, 2, 3, 4]), saved(2), room=8)  # takes the place of what it goes on from
    kept.keep("a", np.array([1, 2, 9]), saved(3), room=8)  # a branch
    assert kept.find("a", np.array([1, 2, 3, 4, 5])) == (4, saved(2))
    assert kept.find("a", np.array([1, 2, 9, 9])) == (3, saved(3))
    assert kept.find("b", np.array([1, 2, 3])) is None
    kept.keep("b", np.array([5, 6]), saved(4), room=8)
    assert kept.find("a", np.array([1, 2, 3, 4])) == (2, saved(3)), "the oldest is gone"
    assert kept.find("b", np.array([5, 6, 7])) == (2, saved(4))
