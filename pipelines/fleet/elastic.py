"""The elastic rollout pool: engines come and go while training goes on.

    who waits for whom (asyncrl.fleet.elastic decides)
        |
        +-- grow:   place_engine -> start -> fetch the current version -> serve           nobody else stops
        +-- shrink: drain it, no new tickets -> completions go to others -> leave -> end     they continue there

A new engine reads the version that counts from where the trainer has put it: the shared memory of this machine, or the
file. Where it cannot, a peer writes it a file, beside its own work. Only if that fails too, everybody gets the version
once more. It serves after the same digest and probe as any publication.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from actors.fleet import CLOSE_SECONDS, Fleet
from actors.publisher import disagreement
from actors.rollout.actor import RolloutActor
from asyncrl.config import Run
from asyncrl.errors import ActorError, EngineError, StorageError, WeightSyncError
from asyncrl.fleet.elastic import ElasticPolicy, WaitMeter
from asyncrl.types import WeightManifest
from asyncrl.weights.transports.registry import serves_late_joiners
from pipelines.fleet.engine_pool import EnginePool, engine_stats
from pipelines.recording.recorder import Recorder

LOOKS = 20
"""Times per interval that the engines' load is looked at."""


class Waits:
    """Told by the loop who waits for whom."""

    def __init__(self) -> None:
        self.meter = WaitMeter(time.monotonic())
        self.for_places = False
        """Generation waits until a group may be admitted."""

    @contextmanager
    def trainer(self) -> Generator[None, None, None]:
        self.meter.trainer(time.monotonic(), waits=True)
        try:
            yield
        finally:
            self.meter.trainer(time.monotonic(), waits=False)

    @contextmanager
    def rollout(self) -> Generator[None, None, None]:
        self.for_places = True
        try:
            yield
        finally:
            self.for_places = False


async def tune(run: Run, fleet: Fleet, engines: EnginePool) -> None:
    """Adapt how much each engine is given to what it says of itself; ends by being cancelled."""
    while True:
        await asyncio.sleep(run.concurrency.interval_s)
        engines.load.observe(time.monotonic(), await engine_stats(fleet, fleet.state.serving))
        await engines.notify()


class ElasticPool:
    def __init__(
        self,
        run: Run,
        fleet: Fleet,
        engines: EnginePool,
        recorder: Recorder,
        waits: Waits,
        *,
        one_version: asyncio.Lock,
        refit: Callable[[], Awaitable[object]],
        places: Callable[[], int],
    ) -> None:
        """No version is published while `one_version` is held; `refit` publishes to everybody; `places` is how many
        samples may be admitted and not trained on."""
        self._settings = run.elastic
        self._folder = Path(run.root).resolve() / run.name / "weights" / "joining"
        self._deadline_s = run.weights.deadline_s
        self._fleet, self._engines, self._recorder, self._waits = fleet, engines, recorder, waits
        self._state = fleet.state
        self._one_version, self._refit, self._places = one_version, refit, places
        self._policy = ElasticPolicy(run.elastic, run.rollout.replicas)
        self._names = (f"rollout-{number}" for number in count(run.rollout.replicas))

    async def run(self) -> None:
        """Ends by being cancelled."""
        self._waits.meter.read(time.monotonic())
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._fleet.factory.expect(self._policy.wanted)
                    self._follow(tasks)
                    await self._look()
        finally:
            self._fleet.factory.expect(0)

    async def _look(self) -> None:
        """Measure one interval, and decide."""
        serving = self._state.serving
        for _ in range(LOOKS):
            empty = self._engines.load.empty(serving, self._places()) if self._waits.for_places else 0.0
            self._waits.meter.rollout(time.monotonic(), empty)
            await asyncio.sleep(self._settings.interval_s / LOOKS)
        stats = (await engine_stats(self._fleet, self._state.serving)).values()
        queued = sum(said.waiting for said in stats) / max(1, sum(said.running for said in stats))
        measured = self._waits.meter.read(time.monotonic(), queued)
        size = len(self._state.serving)
        self._recorder.event("pool", size=size, wanted=self._policy.wanted, **measured._asdict())
        resize = self._policy.observe(time.monotonic(), size, measured)
        if resize is not None:
            self._recorder.resized(size, resize.wanted, resize.reason)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Begin what leads to the size that is wanted."""
        state = self._state
        for name in state.in_state("gone"):
            self._end(name, state.leave(name))
        more = self._policy.wanted - len(state.in_state("healthy", "stale", "restarting", "joining"))
        for _ in range(more):
            name = next(self._names)
            state.join(name)
            tasks.create_task(self._join(name))
        for name in state.serving[max(1, len(state.serving) + more) :] if more < 0 else ():
            state.drain(name)
            tasks.create_task(self._drain(name))

    # -- an engine comes -----------------------------------------------------------------------------------------

    async def _join(self, name: str) -> None:
        begun = time.time()
        self._recorder.event("engine_joining", engine=name)
        try:
            async with asyncio.timeout(self._settings.join_timeout_s):
                version = await self._enter(name)
        except (TimeoutError, ActorError, EngineError) as error:
            self._policy.refused(time.monotonic(), len(self._state.serving))
            self._recorder.event(
                "engine_not_joined", engine=name, reason=str(error) or "not placed, or no weights loaded, in time"
            )
            return
        if version is None:
            await self._refit()
        self._recorder.span("engine_joined", begun, engine=name, version=version)
        await self._engines.notify()

    async def _enter(self, name: str) -> int | None:
        """Place and start it; the version that it serves, or None if everybody has to be given one for it."""
        actor: RolloutActor | None = None
        try:
            actor = await self._fleet.factory.place_engine(name)
            await actor.start()
            async with self._one_version, asyncio.timeout(self._deadline_s):
                version = await self._catch_up(name, actor)
                self._state.started(name, actor)
                if version is not None:
                    self._state.include(name)
                    self._state.acknowledged(name, version)
                return version
        finally:
            if name in self._state.in_state("joining"):
                self._state.leave(name)
                self._end(name, actor)

    async def _catch_up(self, name: str, actor: RolloutActor) -> int | None:
        """Load the version that counts, with nobody else stopping; None if there is no way to it."""
        current = self._state.manifest
        if current is None:
            return self._state.published_version  # every engine begins with the weights of the run's model
        ways: list[Callable[[], Awaitable[WeightManifest]]] = [self._from_peer]
        if serves_late_joiners(current):
            ways.insert(0, lambda: _same(current))
        for way in ways:
            try:
                manifest = await way()
                wrong = disagreement(await actor.load_weights(manifest), manifest)
            except (StorageError, WeightSyncError) as error:
                wrong = str(error)
            finally:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            if not wrong:
                return current.version
            self._recorder.event("engine_way", engine=name, reason=wrong)
        return None

    async def _from_peer(self) -> WeightManifest:
        peer = min(self._state.serving, key=self._engines.load.of)
        return await self._state.handles[peer].export(self._folder)

    # -- an engine goes ------------------------------------------------------------------------------------------

    async def _drain(self, name: str) -> None:
        begun = time.time()
        actor, samples = self._state.handles[name], self._engines.load.of(name)
        self._recorder.event("engine_draining", engine=name, samples=samples)
        # Between two publications every engine has the same version: no completion goes on under an older one.
        async with self._one_version:
            with suppress(ActorError, TimeoutError):
                async with asyncio.timeout(self._deadline_s):
                    await actor.drain()
        await self._engines.idle(name)
        async with self._one_version:
            with suppress(ActorError):
                self._recorder.left(name, await actor.stats())
            if drained := name in self._state.in_state("draining"):
                self._state.leave(name)
        if drained:  # else it died meanwhile, and is ended as any engine that is gone
            with suppress(ActorError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await actor.close()
            self._end(name, actor)
        self._recorder.span("engine_left", begun, engine=name, samples=samples)

    def _end(self, name: str, actor: RolloutActor | None) -> None:
        """The process of one that is no member any more."""
        if actor is not None:
            self._fleet.factory.end(actor)
        self._engines.load.forget(name)


async def _same(manifest: WeightManifest) -> WeightManifest:
    return manifest
