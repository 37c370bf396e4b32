"""A notice that a node goes is heard although Ray and actors were too busy to answer at first."""

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from actors.runtime import drain
from actors.runtime.drain import DrainNotice, drain_notice


def test_who_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.0)
    asked: list[tuple[str, ...]] = []

    def find(actors: Mapping[str, object]) -> Mapping[str, str]:
        asked.append(tuple(actors))
        if len(asked) == 1:
            raise ConnectionError("Ray does not answer")
        if len(asked) == 2:
            return {"driver": "head", "trainer": "one"}  # the buffer computes
        return {"buffer": "two"}

    def answers() -> Iterator[Mapping[str, int]]:
        yield {"three": 0}

        while True:
            yield {"two": 0}

    going, looks = answers(), 0

    def draining() -> Mapping[str, int]:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise TimeoutError("Ray is late")
        return next(going)

    async def wait() -> DrainNotice:
        async with asyncio.timeout(30):
            return await drain_notice({"trainer": object(), "buffer": object()}, find, draining)

    assert asyncio.run(wait()) == DrainNotice("two", ("buffer",), None)
    assert asked == [("driver", "trainer", "buffer"), ("driver", "trainer", "buffer"), ("buffer",)]
    assert looks >= 3
