"""The engines of a run: who gets which groups, and what happens when one dies.

    share -> generate on the engine with the least to do
                 | its process dies
                 v
             what it had not finished goes to the others, each answer from where it was at the last weight update;
             the process is made anew, started, given the current weights, and takes part again

An engine that is told to leave (pipelines/elastic.py) hands its answers over in the same way.
Only a dead process is replaced. One that hangs is the watchdog's business.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from actors import spawn
from actors.fleet import Fleet
from actors.publisher import Published
from actors.rollout import RolloutActor
from asyncrl.config import Run
from asyncrl.errors import ActorError, EngineError, WeightSyncError
from asyncrl.flow.health import FleetHealth
from asyncrl.tasks.base import Task
from asyncrl.types import Segment, Slot, Ticket
from pipelines.load import Load
from pipelines.recorder import Recorder

RESUME = "`asyncrl resume` continues from the last checkpoint"
RETRY_SECONDS = 0.5
"""Between two looks whether a process is back."""
T = TypeVar("T")
Begun = Mapping[Slot, tuple[Segment, ...]]


class Replicas:
    def __init__(
        self, run: Run, fleet: Fleet, task: Task, recorder: Recorder, refit: Callable[[], Awaitable[object]]
    ) -> None:
        """`refit` calls `publish`, and tells everybody who has to know."""
        self._run, self._fleet, self._task, self._recorder, self._refit = run, fleet, task, recorder, refit
        self._actors = fleet.engines
        self.health = FleetHealth(tuple(self._actors), run.recovery.max_restarts)
        self.load = Load(run)
        self._one_by_one = run.elastic.on or run.concurrency.adaptive
        """Each group is a call of its own, so that what an engine holds is known to the group."""
        self._changed = asyncio.Condition()
        self._recovering: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def share(self, tickets: Sequence[Ticket], work: asyncio.TaskGroup, begun: Begun | None = None) -> None:
        """Begin to generate; waits only while no engine serves, or none may be given more."""
        waiting = deque(tickets)
        while waiting:
            await self._some(self._with_room)
            shares: dict[str, list[Ticket]] = {}
            while waiting and (free := self._with_room()):
                name = self.load.give(free, len(waiting[0].samples))
                shares.setdefault(name, []).append(waiting.popleft())
            for name, share in shares.items():
                for part in [[ticket] for ticket in share] if self._one_by_one else [share]:
                    work.create_task(self._generate(name, part, begun or {}, work))

    def _with_room(self) -> tuple[str, ...]:
        return self.load.with_room(self.health.serving)

    async def _generate(self, name: str, tickets: list[Ticket], begun: Begun, work: asyncio.TaskGroup) -> None:
        prompts = [(ticket, self._task.prompt("train", ticket.group)) for ticket in tickets]
        groups = {ticket.group for ticket in tickets}
        try:
            await self._actors[name].generate(prompts, {s: parts for s, parts in begun.items() if s.group in groups})
            handed_over = name in self.health.those("draining")
        except (ActorError, EngineError) as error:
            self.lost(name, error)
            handed_over = True
        finally:
            self.load.take_back(name, sum(len(ticket.samples) for ticket in tickets))
            await self.notify()
        if handed_over:
            missing, begun = await self._fleet.buffer.reassign(groups)
            await self.share(missing, work, begun)

    async def _some(self, names: Callable[[], Sequence[str]]) -> tuple[str, ...]:
        """Wait until there are any."""
        async with self._changed:
            await self._changed.wait_for(lambda: names() or not self.health.hopeful)
        if not names():
            died = ", ".join(f"{name} {each.restarts} times" for name, each in self.health.replicas.items())
            raise EngineError(f"no engine is left, they died: {died} (recovery.max_restarts is the limit); {RESUME}")
        return tuple(names())

    async def publish(self) -> Published:
        """Bring the trainer's version to every engine that can be reached, which is how one that came back catches up.

        Waits while none can be. An engine that hangs ends the run; one that dies does not.
        """
        publisher = self._fleet.publisher
        while True:
            for name in await self._some(lambda: self.health.reachable):
                if name not in publisher.living:
                    publisher.join(name)
            try:
                published = await publisher.publish()
            except WeightSyncError:
                if not self._note_deaths():
                    raise
                continue
            self._note_deaths()
            await self._acknowledged(tuple(publisher.living), published.version)
            return published

    def _note_deaths(self) -> bool:
        """Whether any engine died during a publication."""
        died, self._fleet.publisher.died = self._fleet.publisher.died, {}
        for name, error in died.items():
            self.lost(name, error)
        return bool(died)

    async def _acknowledged(self, names: Sequence[str], version: int) -> None:
        if hung := set(self.health.reachable).difference(names):
            raise WeightSyncError(f"{', '.join(sorted(hung))} did not answer to version {version}; {RESUME}")
        for name in names:
            self.health.acknowledged(name, version)
        await self.notify()

    def lost(self, name: str, error: ActorError | EngineError) -> None:
        """An engine died; raises what it died of unless its process can be made anew."""
        if isinstance(error, ActorError) and error.actor != name:
            raise error  # somebody that it needed
        if not self._run.recovery.max_restarts or (isinstance(error, EngineError) and not self._end(name)):
            raise error
        if self.health.died(name):
            self._recorder.lost(name, str(error))
            task = asyncio.create_task(self._bring_back(name))
            self._recovering.add(task)
            task.add_done_callback(self._recovered)

    def _recovered(self, task: asyncio.Task[None]) -> None:
        self._recovering.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def watch(self) -> None:
        """Raises if engines cannot be brought back; ends by being cancelled."""
        await self._failure

    async def repeat(self, call: Callable[[list[RolloutActor]], Awaitable[T]]) -> T:
        """Something that changes nothing, with all engines that serve; once more if one of them dies."""
        while True:
            names = await self._some(lambda: self.health.serving)
            try:
                with self.load.also_busy(names):
                    return await call([self._actors[name] for name in names])
            except ActorError as error:
                if error.actor not in names:
                    raise
                self.lost(error.actor, error)
            finally:
                await self.notify()

    def _end(self, name: str) -> bool:
        """Its engine is useless although its process lives; once is enough."""
        return name not in self.health.those("healthy", "stale") or spawn.end_process(self._actors[name])

    async def _bring_back(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._run.recovery.timeout_s):
                await self._restarted(self._actors[name])
        except (TimeoutError, ActorError, EngineError) as error:
            self.health.gave_up(name)
            self._recorder.event("engine_gone", engine=name, reason=str(error))
            await self.notify()
            if not self.health.hopeful:
                raise EngineError(f"{name} died and did not come back: {error}; {RESUME}") from None
            return
        self.health.started(name)
        await self.notify()
        await self._refit()

    async def _restarted(self, actor: RolloutActor) -> None:
        while True:
            try:
                await spawn.settle(actor)
                await actor.start()
                return
            except ActorError as error:
                if not error.returns:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def idle(self, name: str) -> None:
        """Wait until an engine has nothing to do."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.load.idle(name))

    async def close(self) -> None:
        for task in self._recovering:
            task.cancel()
        await asyncio.gather(*self._recovering, return_exceptions=True)
