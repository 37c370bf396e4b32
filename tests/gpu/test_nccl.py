"""Broadcasts over real NCCL between processes that share one card; some of them are killed in the middle."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import torch

from actors.publisher import Publisher
from actors.trainer.actor import TrainerActor
from asyncrl.errors import WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.system import shared_gpu
from asyncrl.system.devices import mps_runs
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import _by_torch, word_sums
from asyncrl.weights.transports.registry import make_writer
from tests.support import needs
from tests.support.weight_receiver import ProcessEngine

SHARED_CARD = {shared_gpu.VARIABLE: "1"}
DEADLINE = 15.0
"""Ranks of one card form a communicator one after the other."""


def _hindrance() -> str:
    if not torch.cuda.is_available():
        return needs.GPU
    pytest.importorskip("cupy", reason=needs.package("nccl"))
    from asyncrl.weights.transports import nccl

    return needs.shared_gpu(shared_gpu.numbers(nccl.nccl().get_version()))


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
killing = pytest.mark.skipif(mps_runs(), reason=needs.NO_MPS)


@pytest.fixture(autouse=True)
def _several_ranks_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    if hindrance := _hindrance():
        pytest.skip(hindrance)
    for name, value in SHARED_CARD.items():
        monkeypatch.setenv(name, value)


class Trainer:
    """What a publisher asks of a trainer: 600 MB in three buckets, that change a little with each version."""

    def __init__(self, *, delta: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.tensors = {
            "large": torch.randn(300_000_001, device="cuda", generator=generator, dtype=torch.bfloat16),
            "small": torch.randn(5, device="cuda", generator=generator),
        }
        self._writer = make_writer(self.tensors.items, "nccl", prefix="test", deadline_s=DEADLINE, delta=delta)
        self.version = 0
        self.orders: list[SendOrder] = []
        self.manifests: list[WeightManifest] = []

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        self.orders.append(order)
        self.manifests.append(self._writer.publish(self.version, order))
        return self.manifests[-1]

    def move(self) -> None:
        self.version += 1
        self.tensors["large"][:1000] += 1

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def scene(*engines: ProcessEngine, delta: bool = False) -> AsyncGenerator[tuple[Trainer, Publisher], None]:
    trainer = Trainer(delta=delta)
    state = FleetState({engine.name: cast(Any, engine) for engine in engines})
    publisher = Publisher(
        cast(TrainerActor, trainer), state, deadline_s=DEADLINE + 5, export_s=60, grace_s=5.0, required=1
    )
    try:
        await asyncio.gather(*(engine.start(**SHARED_CARD) for engine in engines))
        yield trainer, publisher
    finally:
        for engine in engines:
            await engine.end()
        trainer.close()


@pytest.mark.parametrize("count", [1, 2], ids=["two ranks", "three ranks"])
def test_versions_arrive(count: int) -> None:
    async def scenario() -> None:
        async with scene(*(ProcessEngine(f"e{number}") for number in range(count))) as (trainer, publisher):
            for version in (1, 2, 3):
                trainer.move()
                published = await publisher.publish()
                assert (published.version, published.attempts) == (version, 1)
                assert len(trainer.manifests[-1].buckets) == 3
            assert len({manifest.digest for manifest in trainer.manifests}) == 3
            assert {order.epoch for order in trainer.orders} == {1}, "one communicator for all"

    asyncio.run(scenario())


def test_only_what_changed_is_sent() -> None:
    async def scenario() -> None:
        async with scene(ProcessEngine("e0"), delta=True) as (trainer, publisher):
            for _ in range(3):
                trainer.move()
                assert (await publisher.publish()).attempts == 1
            sparse = trainer.manifests[-1].delta
            assert sparse is not None
            assert sparse.total_bytes < 10_000

    asyncio.run(scenario())


@killing
def test_a_rank_killed_in_mid_broadcast_is_left_behind() -> None:
    async def scenario() -> None:
        engines = ProcessEngine("e0"), ProcessEngine("dying", "dies"), ProcessEngine("e2")
        async with scene(*engines) as (trainer, publisher):
            trainer.move()
            began = time.monotonic()
            published = await publisher.publish()
            assert time.monotonic() - began < 3 * (DEADLINE + 5)
            assert (published.version, published.attempts) == (1, 2)
            assert trainer.orders[-1] == SendOrder(2, ("e0", "e2"), dense=True)
            trainer.move()
            published = await publisher.publish()
            assert (published.version, published.attempts) == (2, 1), "the new epoch lasts"

    asyncio.run(scenario())


def test_a_rank_that_hangs_is_not_waited_for_beyond_its_deadline() -> None:
    async def scenario() -> None:
        engines = ProcessEngine("e0"), ProcessEngine("e1")
        async with scene(*engines) as (trainer, publisher):
            trainer.move()
            await publisher.publish()
            engines[1].signal(signal.SIGSTOP)
            trainer.move()
            published = await publisher.publish()
            assert (published.version, published.attempts) == (2, 2)
            assert trainer.orders[-1].members == ("e0",)

    asyncio.run(scenario())


@killing
def test_the_last_rank_to_die_stops_it_with_the_reason() -> None:
    async def scenario() -> None:
        async with scene(ProcessEngine("dying", "dies")) as (trainer, publisher):
            trainer.move()
            with pytest.raises(WeightSyncError, match="version 1 does not count, version 0 does: actor dying died"):
                await publisher.publish()

    asyncio.run(scenario())


def test_the_kernel_sums_words_as_torch_does() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    memory = torch.randint(0, 256, (64 * 1_000_003,), dtype=torch.uint8, device="cuda", generator=generator)
    ranges = [(0, 64), (64, 64 * 1_000_002), (6400, 64 * 999)]
    assert word_sums(memory, ranges) == [_by_torch(memory.cpu(), *part) for part in ranges]
