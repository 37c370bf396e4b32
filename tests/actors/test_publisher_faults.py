"""Publications to real processes that are killed, stopped, or find a flipped bit."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from actors.publisher import Publisher
from actors.trainer.actor import TrainerActor
from asyncrl.config.weights import TransportName
from asyncrl.errors import WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.system.optional import require
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.transports import cuda_ipc, file
from asyncrl.weights.transports.base import Writer
from asyncrl.weights.transports.registry import make_writer, to_file
from tests.support import needs
from tests.support.weight_receiver import ProcessEngine

GRACE = 0.5
DEADLINES: dict[TransportName, float] = {"shared_memory": 2.0, "file": 2.0, "cuda_ipc": 10.0}
ON_GPU = pytest.param(
    "cuda_ipc",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)],
)
Spoil = Callable[[Writer, WeightManifest, int], None]
"""Called with what was published, and how often that happened."""


class Trainer:
    """What a publisher asks of a trainer, without the training."""

    def __init__(self, transport: TransportName, folder: Path, spoil: Spoil) -> None:
        device = "cuda" if transport == "cuda_ipc" else "cpu"
        self.weights, bias = torch.zeros(4096, device=device), torch.ones(3, device=device)
        self._writer: Writer = make_writer(
            lambda: [("w", self.weights), ("bias", bias)], transport, prefix="t", folder=folder, delta=True
        )
        self.version = 0
        self.orders: list[SendOrder] = []
        self.manifests: list[WeightManifest] = []
        self._spoil = spoil

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        manifest = self._writer.publish(self.version, order)
        self.orders.append(order)
        self.manifests.append(manifest)
        self._spoil(self._writer, manifest, len(self.orders))
        return manifest

    def move(self) -> None:
        self.version += 1
        self.weights[self.version] = self.version

    def close(self) -> None:
        self._writer.close()


def _nothing(_: Writer, __: WeightManifest, ___: int) -> None: ...


class Scene:
    def __init__(
        self, trainer: Trainer, engines: list[ProcessEngine], state: FleetState[Any], publisher: Publisher
    ) -> None:
        self.trainer, self.engines, self.state, self.publisher = trainer, engines, state, publisher


@asynccontextmanager
async def scene(
    transport: TransportName,
    folder: Path,
    *,
    engines: int = 2,
    required: int | None = None,
    spoil: Spoil = _nothing,
) -> AsyncGenerator[Scene, None]:
    trainer = Trainer(transport, folder, spoil)
    processes = [ProcessEngine(f"e{number}") for number in range(engines)]
    state = FleetState({process.name: cast(Any, process) for process in processes})
    publisher = Publisher(
        cast(TrainerActor, trainer),
        state,
        deadline_s=DEADLINES[transport],
        export_s=30.0,
        grace_s=GRACE,
        required=required,
    )
    try:
        await asyncio.gather(*(process.start() for process in processes))
        trainer.move()
        assert (await publisher.publish()).version == 1
        trainer.move()
        yield Scene(trainer, processes, state, publisher)
    finally:
        for process in processes:
            await process.end()
        trainer.close()


def _flip(writer: Writer, manifest: WeightManifest) -> None:
    location = (manifest.delta or manifest).location
    if location.startswith(cuda_ipc.SCHEME):
        _flip_on_gpu(writer, location)
        return
    path = Path(location.removeprefix(file.SCHEME))
    content = bytearray(path.read_bytes())
    content[-3 if location.startswith(file.SCHEME) else 100] ^= 16
    path.write_bytes(content)


def _flip_on_gpu(writer: Writer, location: str) -> None:
    cupy = require("cupy", extra="nccl")
    assert isinstance(writer, cuda_ipc.CudaIpcWriter)
    handle, offset = location.removeprefix(cuda_ipc.SCHEME).split("@")
    assert handle == cupy.cuda.runtime.ipcGetMemHandle(writer._memory.data.ptr).hex()
    writer._memory[int(offset) + 100] ^= 16
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("transport", ["shared_memory", "file", ON_GPU])
def test_a_flipped_bit_is_sent_again(transport: TransportName, tmp_path: Path) -> None:
    def once(writer: Writer, manifest: WeightManifest, exports: int) -> None:
        if exports == 2:
            _flip(writer, manifest)

    async def scenario() -> None:
        async with scene(transport, tmp_path / "w", spoil=once) as at:
            published = await at.publisher.publish()
            assert (published.version, published.attempts) == (2, 2)
            assert [order.dense for order in at.trainer.orders] == [False, False, True]
            assert [order.epoch for order in at.trainer.orders] == [1, 1, 2]
            sparse = at.trainer.manifests[1].delta is not None
            assert sparse == (transport == "file"), "the first attempt were only the changes"
            at.trainer.move()
            published = await at.publisher.publish()
            assert (published.version, published.attempts) == (3, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", ON_GPU])
def test_bits_that_flip_every_time_stop_it_with_the_reason(transport: TransportName, tmp_path: Path) -> None:
    def always(writer: Writer, manifest: WeightManifest, exports: int) -> None:
        if exports in (2, 3):
            _flip(writer, manifest)

    async def scenario() -> None:
        async with scene(transport, tmp_path, spoil=always) as at:
            with pytest.raises(WeightSyncError, match="version 2 does not count, version 1 does: engine e") as caught:
                await at.publisher.publish()
            assert "version 1 is kept" in str(caught.value)
            assert "asyncrl resume" in str(caught.value)

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", ON_GPU])
def test_an_engine_killed_in_mid_sync_stops_it_with_the_reason(transport: TransportName, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(transport, tmp_path) as at:
            at.engines[1].signal(signal.SIGSTOP)  # so that it cannot be done before it is killed
            publishing = asyncio.create_task(at.publisher.publish())
            await asyncio.sleep(0.3)
            assert not publishing.done()
            at.engines[1].signal(signal.SIGKILL)
            with pytest.raises(WeightSyncError, match="version 2 does not count, version 1 does: actor e1 died"):
                await publishing
            assert at.state.participants == ("e0",)
            assert at.state.published_version == 1

    asyncio.run(scenario())


def test_an_engine_killed_in_mid_sync_is_left_behind_where_that_is_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene("file", tmp_path / "w", engines=3, required=1) as at:
            at.engines[1].signal(signal.SIGSTOP)
            publishing = asyncio.create_task(at.publisher.publish())
            await asyncio.sleep(0.3)
            at.engines[1].signal(signal.SIGKILL)
            published = await publishing
            assert (published.version, published.attempts) == (2, 2)
            assert at.trainer.orders[-1] == SendOrder(2, ("e0", "e2"), dense=True)
            assert (at.state.serving, at.state.hung) == (("e0", "e2"), ()), "it died, it does not hang"
            at.trainer.move()
            assert (await at.publisher.publish()).version == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", ON_GPU])
@pytest.mark.parametrize("required", [2, 1], ids=["all are required", "one is enough"])
def test_an_engine_that_hangs_is_not_waited_for_beyond_its_deadline(
    required: int, transport: TransportName, tmp_path: Path
) -> None:
    deadline = DEADLINES[transport]

    async def scenario() -> None:
        async with scene(transport, tmp_path, required=required) as at:
            at.engines[0].signal(signal.SIGSTOP)
            began = time.monotonic()
            if required == 1:
                assert (await at.publisher.publish()).version == 2
                assert (at.state.participants, at.state.hung) == (("e1",), ("e0",))
            else:
                with pytest.raises(WeightSyncError, match=f"no answer from e0 within {deadline:g} s; e0 hung"):
                    await at.publisher.publish()
            assert deadline <= time.monotonic() - began < 2 * (deadline + GRACE) + 20

    asyncio.run(scenario())


def test_an_engine_that_joins_late_gets_the_version_as_a_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene("shared_memory", tmp_path / "w", engines=1) as at:
            await at.publisher.publish()
            late = ProcessEngine("late")
            await late.start()
            try:
                manifest = to_file(at.trainer.manifests[-1], tmp_path / "late")
                ack = await late.load_weights(manifest)
                assert (ack.version, ack.digest) == (2, at.trainer.manifests[-1].digest)
            finally:
                await late.end()

    asyncio.run(scenario())
