"""Many rollout actors on one buffer: does it hold, at what cost, and does it stay as small as it was?

    python -m benchmarks.many_actors [--actors 4 64] [--seconds 30]

The buffer actor, its admission and the driver are the real ones, each in a process of its own, at durability
`process`. Rollout actors are the real class over the fake engine, every one with its own name, engine, outbox and
calls to the buffer; two cores cannot run 64 Python interpreters, so they share two processes. The trainer takes, reads,
commits and publishes as the real one does, and computes nothing; the reward is given at once. Each version that is
published ends a segment of every running answer, and each actor tells the buffer how far its answers are.

Cost is CPU time per trajectory, of the buffer's process alone and of all four, so it does not depend on what else the
machine has to do. Trajectories per second do.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.buffer import BufferActor
from actors.rollout.actor import RolloutActor
from actors.runtime.resources import Resources
from actors.runtime.spawn import Spawner, cluster
from asyncrl.config import Buffer, Flow, Rollout, Run, WarmStart
from asyncrl.config.engine import FakeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.types import Prompt, Ticket, WeightManifest
from asyncrl.user_code.protocol import RewardInput

GROUP, GROUPS_PER_STEP, STALENESS = 8, 384, 3
"""A window that bounds no rate of interest. A group may take as long as its window of (STALENESS + 1) steps, and the
longest answer of a step always comes: 64 tokens at 0.05 s, and a second to be shared out, gathered and published. Of
8 * 384 * 4 samples in 4.2 s the trainer gets 2,900 a second; with 256 groups it would get 1,950, however fast the
buffer is."""
HOSTS = 2
BAR_RATE, BAR_COST, BAR_MEMORY = 2000.0, 1.3, 1.05
WARM_UP_S = 10.0
"""Left out: Python and Arrow take their memory in the beginning."""
NOTHING = Resources(cpus=0.0)


def settings(actors: int) -> Run:
    """Together the engines could decode more than the buffer is asked to take, however many they are."""
    return Run(
        name="many",
        max_staleness=STALENESS,
        engine=FakeEngine(median_tokens=16, sigma=0.5, step_seconds=0.05, max_batch=8192 // actors),
        rollout=Rollout(replicas=actors, group_size=GROUP, max_tokens=64),
        flow=Flow(groups_per_step=GROUPS_PER_STEP, groups_per_take=8),
        buffer=Buffer(durability="process"),
    )


class Judge:
    """A reward that costs nothing, in the place of the reward actor."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[float]:
        return [float(number % 2) for number in range(len(inputs))]


class Host:
    """Several rollout actors in one process."""

    def __init__(self, run: Run, model: Path, names: Sequence[str], buffer: BufferActor) -> None:
        judge: object = Judge()
        self._actors = {name: RolloutActor(run, model, name, buffer, judge) for name in names}  # pyright: ignore

    async def start(self) -> None:
        await asyncio.gather(*(actor.start() for actor in self._actors.values()))

    async def generate(self, name: str, work: list[tuple[Ticket, Prompt]]) -> None:
        await self._actors[name].generate(work)

    async def load_weights(self, manifest: WeightManifest) -> None:
        await asyncio.gather(*(actor.load_weights(manifest) for actor in self._actors.values()))

    async def close(self) -> None:
        await asyncio.gather(*(actor.close() for actor in self._actors.values()))


class Usage(NamedTuple):
    cpu_s: float
    resident: int


def used(pid: int) -> Usage:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage((int(words[11]) + int(words[12])) / ticks, int(words[21]) * os.sysconf("SC_PAGE_SIZE"))


def own_pid(_: object) -> int:
    return os.getpid()


class Result(NamedTuple):
    actors: int
    rate: float
    """Trajectories per second that went all the way through."""
    buffer_us: float
    """CPU time of the buffer's process per trajectory, in microseconds."""
    driver_us: float
    hosts_us: float
    resident: tuple[int, int]
    """Bytes of the buffer's process in the first and the last tenth."""

    @property
    def all_us(self) -> float:
        return self.buffer_us + self.driver_us + self.hosts_us

    @property
    def growth(self) -> float:
        return self.resident[1] / self.resident[0]


async def measure(actors: int, seconds: float, spawner: Spawner, model: Path, home: Path) -> Result:
    run = settings(actors)
    names = [f"rollout-{number}" for number in range(actors)]
    buffer = await spawner.spawn(f"buffer-{actors}", NOTHING, BufferActor, run, home / "trajectories", None)
    hosts = [
        await spawner.spawn(f"host-{actors}-{number}", NOTHING, Host, run, model, names[number::HOSTS], buffer)
        for number in range(HOSTS)
    ]
    await asyncio.gather(*(host.start() for host in hosts))
    load = _Load(run, buffer, {name: hosts[number % HOSTS] for number, name in enumerate(names)})
    try:
        return await load.drive(actors, seconds, [buffer, *hosts])
    finally:
        await asyncio.gather(*(host.close() for host in hosts))
        await buffer.close()


class _Load:
    """The driver: shares groups out as they are admitted, and takes what is complete as a trainer does."""

    def __init__(self, run: Run, buffer: BufferActor, homes: dict[str, Host]) -> None:
        self._run, self._buffer, self._homes = run, buffer, homes
        self._load = dict.fromkeys(homes, 0)
        self.taken = 0

    async def drive(self, actors: int, seconds: float, remote: Sequence[object]) -> Result:
        pids = [os.getpid(), *await _pids(remote)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._generate()), tasks.create_task(self._train())]
            await asyncio.sleep(WARM_UP_S)
            began, first, before = time.perf_counter(), self.taken, [used(pid) for pid in pids]
            resident: list[int] = []
            while time.perf_counter() - began < seconds:
                await asyncio.sleep(seconds / 50)
                resident.append(used(pids[1]).resident)
            passed, count = time.perf_counter() - began, self.taken - first
            cpu = [used(pid).cpu_s - old.cpu_s for pid, old in zip(pids, before, strict=True)]
            for task in running:
                task.cancel()
        tenth = max(1, len(resident) // 10)
        return Result(
            actors=actors,
            rate=count / passed,
            buffer_us=1e6 * cpu[1] / count,
            driver_us=1e6 * cpu[0] / count,
            hosts_us=1e6 * sum(cpu[2:]) / count,
            resident=(int(np.mean(resident[:tenth])), int(np.mean(resident[-tenth:]))),
        )

    async def _generate(self) -> None:
        """As pipelines.fleet.engine_pool does: each group to the engine with the least to do, one call per engine."""
        async with asyncio.TaskGroup() as work:
            while True:
                shares: dict[str, list[Ticket]] = {}
                for ticket in await self._buffer.admit(timeout_s=60.0):
                    name = min(self._load, key=lambda each: self._load[each])
                    self._load[name] += len(ticket.samples)
                    shares.setdefault(name, []).append(ticket)
                for name, share in shares.items():
                    work.create_task(self._share(name, share))

    async def _share(self, name: str, tickets: list[Ticket]) -> None:
        prompts = [(each, Prompt(uid=f"many/{each.group}", text=f"{each.group}=", answer="1")) for each in tickets]
        await self._homes[name].generate(name, prompts)
        self._load[name] -= sum(len(ticket.samples) for ticket in tickets)

    async def _train(self) -> None:
        flow, step, taken = self._run.flow, 0, 0
        while True:
            delivery = await self._buffer.take(flow.groups_per_take, flow.groups_per_step - taken, 60.0)
            await self._buffer.read(delivery)
            taken += len(delivery.groups)
            if taken == flow.groups_per_step:
                await self._buffer.commit(step)
                step, taken = step + 1, 0
                await self._publish(step)
            self.taken += len(delivery.groups) * GROUP

    async def _publish(self, version: int) -> None:
        manifest = WeightManifest(version=version, tensors=(), total_bytes=0, digest="", location="")
        await asyncio.gather(*(host.load_weights(manifest) for host in set(self._homes.values())))
        await self._buffer.advance(version)


async def _pids(remote: Sequence[object]) -> list[int]:
    from actors.runtime.health_probe import ask

    found = await asyncio.to_thread(ask, {str(n): each for n, each in enumerate(remote)}, own_pid, 30.0)
    return [pid for _, pid in sorted(found.items()) if isinstance(pid, int)]


def table(results: Sequence[Result]) -> Table:
    found = Table("rollout actors", "trajectories/s", "CPU each: buffer", "driver", "engines", "all", "buffer's memory")
    for each in results:
        found.add_row(
            str(each.actors),
            f"{each.rate:,.0f}",
            f"{each.buffer_us:.0f} us",
            f"{each.driver_us:.0f} us",
            f"{each.hosts_us:.0f} us",
            f"{each.all_us:.0f} us",
            f"{each.resident[0] >> 20} -> {each.resident[1] >> 20} MiB",
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", type=int, nargs="*", default=(4, 64))
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    from asyncrl.training.warm_start import make_model

    with tempfile.TemporaryDirectory(prefix="asyncrl-many-") as name:
        home = Path(name)
        model = make_model(WarmStart(steps=1), ChainsTask(), 0, home / "model")  # only its tokenizer is used
        with cluster("local", cpus=1) as spawner:
            results = [
                asyncio.run(measure(actors, options.seconds, spawner, model, home / str(actors)))
                for actors in options.actors
            ]
    Console(width=120).print(table(results))
    few, many = results[0], results[-1]
    bars = {
        f"{many.rate:,.0f} trajectories/s with {many.actors} actors, at least {BAR_RATE:,.0f}": many.rate >= BAR_RATE,
        f"cost {many.all_us / few.all_us:.2f}x, at most {BAR_COST}x": many.all_us <= BAR_COST * few.all_us,
        f"memory {many.growth:.3f}x, at most {BAR_MEMORY}x": many.growth <= BAR_MEMORY,
    }
    for text, held in bars.items():
        print(f"{'held    ' if held else 'NOT held'} {text}")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return not all(bars.values())


if __name__ == "__main__":
    sys.exit(main())
