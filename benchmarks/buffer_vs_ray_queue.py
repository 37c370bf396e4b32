"""Trajectory buffer against a Ray queue: append and take of 4k-token trajectories in MB/s, all in one run.

    python -m benchmarks.buffer_vs_ray_queue [--trajectories 1024]

A producer process, the store's process and a consumer process, each time. The same trajectories go through: 4096
tokens with id, log-probability and policy version, the 12 bytes a token that MB counts, whatever an encoding adds. The
consumer ends with int32 and float32 arrays. Our structs and the baseline's objects are made before the clock starts;
encoding or pickling, transport, storing, handing out and decoding are inside. Each producer has two calls under way.

- buffer: `BufferActor` at durability `process`. A trajectory is encoded to Arrow, checked, checksummed, deduplicated
  and in the file before it is acknowledged; staleness and memory are accounted for; complete groups are taken.
- queue: `ray.util.queue.Queue`, in memory only. One sample per put and get, a dataclass with lists of Python numbers.
  The bar, 5x, is against this. Part of the distance is batching: the buffer gets 32 samples to a call.
- queue, batches: the same objects, 32 to a call as well: the distance without the batching.
- queue, array batches: numpy arrays in place of the lists, too. It does none of the buffer's work and may be faster.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.buffer import BufferActor
from actors.runtime.spawn import OnRay, Resources, cluster
from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.data.arrow import decode, encode
from asyncrl.types import Segment, Slot, Trajectory

GROUP, GROUPS_PER_STEP, TOKENS, PROMPT = 8, 16, 4096, 128
BATCH = 4 * GROUP
"""Trajectories of one call: what engines finish together, and what a trainer takes for one forward and backward."""
BYTES = 12 * TOKENS
RUN = Run(
    name="bench",
    max_staleness=3,
    rollout=Rollout(group_size=GROUP, max_tokens=TOKENS),
    flow=Flow(groups_per_step=GROUPS_PER_STEP, groups_per_take=BATCH // GROUP),
    buffer=Buffer(durability="process"),
)
CPU = Resources(cpus=0.25)  # of four: all twelve actors stay to the end


@dataclass
class Sample:
    """A trajectory as peers hold it."""

    uid: str
    tokens: Any
    logprobs: Any
    versions: Any
    reward: float


def trajectory(group: int, sample: int) -> Trajectory:
    rng = np.random.default_rng(group * GROUP + sample)
    answer = TOKENS - PROMPT
    tokens, logprobs = rng.integers(0, 150_000, TOKENS), -rng.random(answer)
    half = answer // 2
    version = max(0, group // GROUPS_PER_STEP - RUN.max_staleness)  # published when the group is admitted
    return Trajectory(
        slot=Slot(group, sample),
        prompt=f"bench/{group}",
        segments=(
            Segment.given(tokens[:PROMPT]),
            Segment.sampled(tokens[PROMPT : PROMPT + half], logprobs[:half], version),
            Segment.sampled(tokens[PROMPT + half :], logprobs[half:], version + 1),
        ),
        reward=1.0,
        finish="stop",
        started=0.0,
        finished=1.0,
        engine="bench",
    )


def made(count: int) -> list[Trajectory]:
    return [trajectory(index // GROUP, index % GROUP) for index in range(count)]


def as_sample(item: Trajectory, *, arrays: bool) -> Sample:
    columns: list[Any] = [item.tokens, item.logprobs, item.versions]
    tokens, logprobs, versions = columns if arrays else [column.tolist() for column in columns]
    return Sample(f"{item.slot.group}/{item.slot.sample}", tokens, logprobs, versions, item.reward)


class Sender:
    """Keeps two calls under way, so that encoding and transport overlap."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(2)

    async def send(self, tasks: asyncio.TaskGroup, call: Awaitable[Any]) -> None:
        await self._room.acquire()
        tasks.create_task(self._call(call))

    async def _call(self, call: Awaitable[Any]) -> None:
        await call
        self._room.release()


class BufferProducer:
    """Appends as admission allows."""

    def __init__(self, buffer: BufferActor, count: int) -> None:
        self._buffer, self._items = buffer, made(count)

    async def run(self) -> None:
        slots: list[Slot] = []
        sent, sender = 0, Sender()
        async with asyncio.TaskGroup() as tasks:
            while sent < len(self._items):
                while len(slots) < BATCH:
                    for ticket in await self._buffer.admit(timeout_s=60):
                        slots += [Slot(ticket.group, sample) for sample in ticket.samples]
                batch, slots = slots[:BATCH], slots[BATCH:]
                payloads = [encode(self._items[slot.group * GROUP + slot.sample]) for slot in batch]
                await sender.send(tasks, self._buffer.append(payloads))
                sent += len(batch)


class BufferConsumer:
    def __init__(self, buffer: BufferActor, count: int) -> None:
        self._buffer, self._count = buffer, count

    async def run(self) -> int:
        tokens = step = taken = 0
        for _ in range(self._count // BATCH):
            delivery = await self._buffer.take(BATCH // GROUP, BATCH // GROUP, timeout_s=60)
            for payload in await self._buffer.read(delivery):
                item = decode(payload)
                tokens += len(item.tokens) * (len(item.logprobs) == len(item.versions))
            taken += len(delivery.groups)
            if taken == GROUPS_PER_STEP:
                await self._buffer.commit(step)
                step, taken = step + 1, 0
                await self._buffer.advance(step)
        return tokens


class QueueProducer:
    def __init__(self, queue: Any, count: int, batch: int, arrays: bool) -> None:
        self._queue, self._batch = queue, batch
        self._samples = [as_sample(item, arrays=arrays) for item in made(count)]

    async def run(self) -> None:
        sender = Sender()
        async with asyncio.TaskGroup() as tasks:
            for start in range(0, len(self._samples), self._batch):
                samples = self._samples[start : start + self._batch]
                await sender.send(tasks, self._queue.put_async(samples[0] if self._batch == 1 else samples))


class QueueConsumer:
    def __init__(self, queue: Any, count: int, batch: int) -> None:
        self._queue, self._count, self._batch = queue, count, batch

    async def run(self) -> int:
        tokens = 0
        for _ in range(self._count // self._batch):
            got = await self._queue.get_async()
            for sample in [got] if self._batch == 1 else got:
                ids, versions = np.asarray(sample.tokens, np.int32), np.asarray(sample.versions, np.int32)
                tokens += len(ids) * (len(versions) == len(np.asarray(sample.logprobs, np.float32)))
        return tokens


async def timed(producer: Any, consumer: Any, count: int) -> float:
    """MB/s from the first send to the last array."""
    begun = time.perf_counter()
    _, tokens = await asyncio.gather(producer.run(), consumer.run())
    seconds = time.perf_counter() - begun
    assert tokens == count * TOKENS, f"{tokens} tokens arrived, {count * TOKENS} were sent"
    return count * BYTES / seconds / 1e6


async def buffer(ray: OnRay, count: int, directory: Path) -> float:
    actor = await ray.spawn("buffer", CPU, BufferActor, RUN, directory / "trajectories")
    producer = await ray.spawn("buffer-producer", CPU, BufferProducer, actor, count)
    consumer = await ray.spawn("buffer-consumer", CPU, BufferConsumer, actor, count)
    speed = await timed(producer, consumer, count)
    assert (await actor.ledger()).consumed == count
    await actor.close()
    return speed


async def queue(ray: OnRay, count: int, *, batch: int, arrays: bool) -> float:
    from ray.util.queue import Queue  # not above: Ray reads its settings, which `cluster` makes, when it is imported

    store = Queue(maxsize=256 // batch, actor_options={"num_cpus": CPU.cpus})
    name = f"queue-{batch}-{arrays}"
    producer = await ray.spawn(f"{name}-producer", CPU, QueueProducer, store, count, batch, arrays)
    consumer = await ray.spawn(f"{name}-consumer", CPU, QueueConsumer, store, count, batch)
    speed = await timed(producer, consumer, count)
    store.shutdown()
    return speed


async def compare(ray: OnRay, count: int, directory: Path) -> dict[str, float]:
    return {
        "buffer (process)": await buffer(ray, count, directory),
        "queue": await queue(ray, count, batch=1, arrays=False),
        "queue, batches": await queue(ray, count, batch=BATCH, arrays=False),
        "queue, array batches": await queue(ray, count, batch=BATCH, arrays=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1024, help="a multiple of one step's 128")
    count = parser.parse_args().trajectories
    count -= count % (GROUP * GROUPS_PER_STEP)
    with tempfile.TemporaryDirectory() as directory, cluster("local", cpus=4) as ray:
        speeds = asyncio.run(compare(ray, count, Path(directory)))
    ours = speeds["buffer (process)"]
    print(f"{count} trajectories of {TOKENS} tokens, {count * BYTES / 1e6:.0f} MB")
    for name, speed in speeds.items():
        print(f"{name:22}{speed:>8.0f} MB/s{ours / speed:>8.1f}x")


if __name__ == "__main__":
    main()
