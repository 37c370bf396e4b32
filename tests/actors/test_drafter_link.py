"""A drafter that fails never ends a run: completions are the same without it."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from actors import publisher
from actors.drafter.actor import DrafterActor, write_state
from actors.publisher import DrafterLink
from actors.rollout.actor import RolloutActor
from asyncrl.errors import ActorError, EngineError, WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.types import WeightAck, WeightManifest
from tests.support.draft_windows import random_head
from tests.support.full_disk import file_size_limit


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version=version, tensors=(), total_bytes=0, digest=f"head {version}", location="")


class Drafter:
    """Has a new head whenever it is asked, and knows the embedding of no version but the first."""

    def __init__(self) -> None:
        self.offered = 0

    async def offer(self) -> WeightManifest:
        self.offered += 1
        return manifest(self.offered)

    async def follow(self, version: WeightManifest) -> None:
        if version.version > 1:
            raise KeyError("model.embed_tokens.weight")

    async def status(self) -> None:
        if self.offered > 5:
            error = ActorError("actor drafter died during status")
            error.actor = "drafter"
            raise error


class Engine:
    """Takes every other head, and refuses the others in this way."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.loaded: list[int] = []

    async def load_drafter(self, head: WeightManifest) -> WeightAck:
        if self.error is not None and head.version % 2:
            raise self.error
        self.loaded.append(head.version)
        wrong = self.error is None and head.version % 2
        return WeightAck("a", head.version, "another" if wrong else head.digest)


@pytest.mark.parametrize(
    "error",
    [
        EngineError("engine a has no head"),
        WeightSyncError("head 1 has another digest"),
        RuntimeError("CUDA out of memory"),
        None,
    ],
)
def test_heads_that_engines_refuse_are_told_of_and_the_next_ones_are_published(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    engine, published, lost, failed = Engine(error), list[int](), list[str](), list[str]()
    state: FleetState[RolloutActor] = FleetState({"a": cast(RolloutActor, engine)}, 3)

    async def play() -> None:
        link = DrafterLink(cast(DrafterActor, cast(Any, Drafter())), state, timeout_s=5)
        link.follow(manifest(1))
        await asyncio.sleep(0)
        link.follow(manifest(2))
        async with asyncio.timeout(30):
            await link.serve(published.append, lost.append, failed.append)

    asyncio.run(play())
    assert published == [2, 4, 6]
    assert lost == ["actor drafter died during status"]
    assert len(failed) == 1, "not again for each head"


def test_a_version_that_it_cannot_follow_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    failed = list[str]()
    state: FleetState[RolloutActor] = FleetState({}, 3)

    async def play() -> None:
        link = DrafterLink(cast(DrafterActor, cast(Any, Drafter())), state, timeout_s=5)
        link.follow(manifest(2))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await link.serve(lambda _: None, lambda _: None, failed.append)

    asyncio.run(play())
    assert failed == ["it cannot follow version 2: KeyError('model.embed_tokens.weight')"]


class Broken(Drafter):
    """Has no memory for a head to offer."""

    async def offer(self) -> WeightManifest:
        self.offered += 1
        await self.status()
        raise MemoryError("ray::DrafterActor.offer()\nMemoryError: no room for a head")


def test_whatever_a_drafter_raises_is_told_of_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(publisher, "TELL_SECONDS", 0.0)
    lost, failed = list[str](), list[str]()
    state: FleetState[RolloutActor] = FleetState({}, 3)

    async def play() -> None:
        link = DrafterLink(cast(DrafterActor, cast(Any, Broken())), state, timeout_s=5)
        async with asyncio.timeout(30):
            await link.serve(lambda _: None, lost.append, failed.append)

    asyncio.run(play())
    assert failed[0] == "MemoryError: no room for a head"
    assert lost == ["actor drafter died during status"]


def test_a_head_that_finds_no_room_is_told_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    failed = list[str]()
    state: FleetState[RolloutActor] = FleetState({}, 3)

    class Full(Drafter):
        async def save(self) -> None:
            write_state(random_head("eagle"), {}, tmp_path)

    async def play() -> None:
        link = DrafterLink(cast(DrafterActor, cast(Any, Full())), state, timeout_s=5)
        with file_size_limit(100):
            await link.save()
        async with asyncio.timeout(30):
            await link.serve(lambda _: None, lambda _: None, failed.append)

    asyncio.run(play())
    assert len(failed) == 1
    assert failed[0].startswith("its head was not saved: ")
    assert "make room and try again" in failed[0]


def test_the_newest_head_comes_to_engines_that_refused_it_came_back_or_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(publisher, "AGAIN_SECONDS", 0.0)
    published = list[int]()

    class Once(Drafter):
        """Offers one head, and dies after that was looked at often enough."""

        async def offer(self) -> WeightManifest | None:  # type: ignore[override]
            self.offered += 1
            return manifest(1) if self.offered == 1 else None

    class Slow(Engine):
        """Refuses what it is given first."""

        async def load_drafter(self, head: WeightManifest) -> WeightAck:
            self.error, refusal = None, self.error
            if refusal is not None:
                raise refusal
            self.loaded.append(head.version)
            return WeightAck("b", head.version, head.digest)

    engines = {"a": Slow(None), "b": Slow(EngineError("no room")), "c": Slow(None)}
    state: FleetState[RolloutActor] = FleetState({n: cast(RolloutActor, engines[n]) for n in "ab"}, 3)

    def counts(version: int) -> None:
        """Then one process is made anew, and an engine joins."""
        published.append(version)
        state.published(manifest(0))
        state.died("a")
        state.restarted("a")
        state.join("c")
        state.started("c", cast(RolloutActor, engines["c"]))
        for name in "ac":
            state.include(name)
            state.acknowledged(name, 0)

    async def play() -> None:
        link = DrafterLink(cast(DrafterActor, cast(Any, Once())), state, timeout_s=5)
        async with asyncio.timeout(30):
            await link.serve(counts, lambda _: None, lambda _: None)

    asyncio.run(play())
    assert published == [1], "once, when all have it"
    assert {name: engine.loaded for name, engine in engines.items()} == {"a": [1, 1], "b": [1], "c": [1]}
