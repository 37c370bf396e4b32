"""The pool and the real publisher, with engines that come, go, die and hang while a version is under way."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest

from actors.fleet import Fleet
from actors.publisher import Publisher
from asyncrl.config import Recovery, Run
from asyncrl.errors import ActorError, WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.types import Prompt, Segment, SendOrder, Slot, Ticket, WeightAck, WeightManifest
from pipelines.fleet.elastic import ElasticPool, Waits
from pipelines.fleet.engine_pool import EnginePool


class Engine:
    """Acknowledges what it is given, after `before` has been awaited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.before: Callable[[], Awaitable[None]] | None = None
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()

    async def load_weights(self, manifest: WeightManifest) -> WeightAck:
        if self.before is not None:
            await self.before()
        self.version = manifest.version
        return WeightAck(self.name, manifest.version, manifest.digest)

    async def drain(self) -> None: ...

    async def stats(self) -> None: ...

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()


class Trainer:
    def __init__(self) -> None:
        self.version = 0
        self.orders: list[SendOrder] = []

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        self.orders.append(order)
        return WeightManifest(version=self.version, tensors=(), total_bytes=0, digest="d", location="")


class Scene:
    def __init__(self, max_restarts: int = 3) -> None:
        self.engines = {name: Engine(name) for name in ("a", "b")}
        self.state: FleetState[Any] = FleetState(self.engines, max_restarts)
        self.trainer = Trainer()
        self.ended: list[Engine] = []
        publisher = Publisher(cast(Any, self.trainer), self.state, deadline_s=0.2, export_s=5, grace_s=0.1, required=1)
        factory = SimpleNamespace(end=self.ended.append)
        self.fleet = cast(Fleet, SimpleNamespace(state=self.state, publisher=publisher, factory=factory))
        self.run = Run(recovery=Recovery(max_restarts=max_restarts))
        self.lock = asyncio.Lock()
        self.pool = EnginePool(self.run, self.fleet, MagicMock(), MagicMock(), self.publish)

    async def publish(self) -> int:
        async with self.lock:
            self.trainer.version += 1
            return (await self.pool.publish()).version

    def elastic(self) -> ElasticPool:
        return ElasticPool(
            self.run,
            self.fleet,
            self.pool,
            MagicMock(),
            Waits(),
            one_version=self.lock,
            refit=self.publish,
            places=lambda: 1,
        )


def test_what_a_dead_engine_had_goes_on_at_another_and_is_counted() -> None:
    """The larger engine gets the first group, dies, and the other one gets what was missing of it."""

    async def scenario() -> None:
        at, took = Scene(), list[tuple[str, tuple[int, ...]]]()
        ticket = Ticket(group=0, samples=(0, 1, 2), version=0, deadline=1e12)

        def generates(name: str, error: ActorError | None) -> Any:
            async def generate(work: list[tuple[Ticket, Prompt]], _begun: object) -> None:
                took.extend((name, each.samples) for each, _ in work)
                if error is not None:
                    at.state.died(name)  # a publication saw it first
                    raise error

            return generate

        async def reassign(_groups: set[int]) -> tuple[list[Ticket], dict[Slot, tuple[Segment, ...]]]:
            return [msgspec.structs.replace(ticket, samples=(1, 2))], {}

        for name, tokens in (("a", 100), ("b", 200)):
            at.pool.load.measured(name, tokens)
        engines = cast(Any, at.engines)
        killed = ActorError("killed")
        killed.actor = "b"
        engines["b"].generate = generates("b", killed)
        engines["a"].generate = generates("a", None)
        cast(Any, at.fleet).buffer = SimpleNamespace(reassign=reassign)
        recorder, task = MagicMock(), MagicMock()
        task.prompt.return_value = Prompt(uid="0", text="1+1=")
        pool = EnginePool(at.run, at.fleet, task, recorder, at.publish)
        pool.load = at.pool.load
        async with asyncio.TaskGroup() as work:
            await pool.share([ticket], work)
        assert took == [("b", (0, 1, 2)), ("a", (1, 2))]
        recorder.moved.assert_called_once_with("b", 2)
        assert (pool.load.of("a"), pool.load.of("b")) == (0, 0)
        await pool.close()

    asyncio.run(scenario())


def test_one_that_hangs_ends_the_run() -> None:
    async def scenario() -> None:
        at = Scene()

        async def hang() -> None:
            await asyncio.Event().wait()

        at.engines["b"].before = hang
        with pytest.raises(WeightSyncError, match="b did not acknowledge version 1; `asyncrl resume` continues"):
            await at.publish()

    asyncio.run(scenario())


def test_one_that_comes_back_while_a_version_is_under_way_is_not_taken_for_one_that_hangs() -> None:
    async def scenario() -> None:
        at = Scene()
        at.state.died("b")

        async def meanwhile() -> None:
            at.state.restarted("b")

        at.engines["a"].before = meanwhile
        await at.publish()
        assert (at.state.serving, at.state.in_state("stale")) == (("a",), ("b",))
        await at.publish()
        assert (at.state.serving, at.engines["b"].version) == (("a", "b"), 2), "it catches up with the next one"

    asyncio.run(scenario())


def test_one_that_dies_while_it_drains_is_left_behind_and_the_run_goes_on() -> None:
    async def scenario() -> None:
        at = Scene()
        at.state.drain("b")

        async def die() -> None:
            error = ActorError("actor b died in load_weights")
            error.actor = "b"
            raise error

        at.engines["b"].before = die
        assert await at.publish() == 1
        assert (at.state.serving, at.state.in_state("gone")) == (("a",), ("b",))

    asyncio.run(scenario())


def test_one_that_has_left_gets_no_version_although_its_process_still_ends() -> None:
    async def scenario() -> None:
        at = Scene()
        at.state.drain("b")
        leaving = asyncio.create_task(at.elastic()._drain("b"))
        await at.engines["b"].closing.wait()
        await at.publish()
        assert (at.state.members, at.trainer.orders[-1].members) == (("a",), ("a",))
        at.engines["b"].may_close.set()
        await leaving
        assert at.ended == [at.engines["b"]]

    asyncio.run(scenario())


def test_one_that_died_too_often_is_forgotten_also_by_the_publisher() -> None:
    async def scenario() -> None:
        at = Scene(max_restarts=0)
        elastic = at.elastic()
        elastic._policy.wanted = 1

        async def meanwhile() -> None:
            at.engines["a"].before = None
            at.state.died("b")
            async with asyncio.TaskGroup() as tasks:
                elastic._follow(tasks)

        at.engines["a"].before = meanwhile
        await at.publish()
        await at.publish()
        assert (at.state.members, at.ended) == (("a",), [at.engines["b"]])
        assert [order.members for order in at.trainer.orders] == [("a", "b"), ("a",)]
        assert at.trainer.orders[1].epoch > at.trainer.orders[0].epoch

    asyncio.run(scenario())
