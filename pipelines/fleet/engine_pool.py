"""The engines of a run: who gets which groups, and what happens when one dies.

    share -> generate on the engine that asyncrl/fleet/routing.py chooses; turns of its conversations stay there
                 | its process dies
                 v
             what it had not finished goes to the others, each completion from where it was at the last weight update;
             the process is made anew, started, given the current weights, and takes part again

An engine that is told to leave (pipelines/fleet/elastic.py) passes its completions on in the same way.
Only a dead process is replaced. One that hangs is the watchdog's business.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from actors.fleet import Fleet
from actors.publisher import Published
from actors.rollout.actor import RolloutActor
from actors.runtime import spawn
from asyncrl.config import Run
from asyncrl.errors import ActorError, EngineError, WeightSyncError
from asyncrl.fleet.concurrency import InFlightLimit, Pressure
from asyncrl.fleet.routing import Router
from asyncrl.tasks.base import Task
from asyncrl.types import EngineStats, Prompt, Segment, Slot, Ticket
from pipelines.recording.recorder import Recorder

# How much each engine has to do, as the driver counts it: samples that were given to it and are not finished.

WELL_USED = 0.5
"""Of its share of all places: from there on an engine counts as used. Places come back a step at a time, so that
engines which are the bottleneck are between this and full."""


class EngineLoad:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._router = Router()
        self._kv_tokens: dict[str, int] = {}
        self._besides = Counter[str]()
        """Calls that are no training work."""
        self._limits: dict[str, InFlightLimit] = {}

    def with_room(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those that may be given more."""
        return tuple(name for name in names if name not in self._limits or self.of(name) < self._limits[name].limit)

    def give(self, names: Sequence[str], samples: int, prompt: Prompt) -> str:
        return self._router.give(self._capacities(names), samples, "\0".join([*prompt.earlier, prompt.text]))

    def take_back(self, name: str, samples: int) -> None:
        self._router.take_back(name, samples)

    def forget_prefixes(self) -> None:
        """The engines have other weights, and forget them too."""
        self._router.forget()

    def _capacities(self, names: Sequence[str]) -> dict[str, float]:
        """What each can run at a time: as many requests as were measured to pay, or tokens that it has room for."""
        if all(name in self._limits for name in names):
            return {name: self._limits[name].limit for name in names}
        rows = self._run.engine.max_batch * (self._run.engine.length_limit or 0)
        sizes = {name: min(size, rows) or size for name in names if (size := self._kv_tokens.get(name, 0))}
        usual = max(sizes.values(), default=1)
        return {name: sizes.get(name, usual) for name in names}

    def unmeasured(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those whose size is not known."""
        return tuple(name for name in names if name not in self._kv_tokens)

    def measured(self, name: str, kv_tokens: int) -> None:
        self._kv_tokens[name] = kv_tokens

    @contextmanager
    def also_busy(self, names: Sequence[str]) -> Generator[None, None, None]:
        self._besides.update(names)
        try:
            yield
        finally:
            self._besides.subtract(names)

    def idle(self, name: str) -> bool:
        return not self.of(name) and not self._besides[name]

    def of(self, name: str) -> int:
        return self._router.held(name)

    def empty(self, names: Sequence[str], places: int) -> float:
        """The share of the engines' room that is not used, 0 to 1, with `places` for samples in all."""
        if not names:
            return 0.0
        full = WELL_USED * min(self._run.engine.max_batch, max(1, places / len(names)))
        return sum(max(0.0, 1 - self.of(name) / full) for name in names) / len(names)

    def observe(self, now: float, stats: Mapping[str, EngineStats]) -> None:
        """Set each engine's limit by what it says of itself."""
        for name, said in stats.items():
            limit = self._limits.setdefault(name, InFlightLimit(self._run.concurrency))
            pressure = Pressure(
                said.running, said.waiting, said.generated_tokens, said.preempted, said.reprefilled_tokens
            )
            limit.observe(now, self.of(name), pressure)

    def died(self, name: str) -> None:
        """Its next process holds nothing, and may be of another size."""
        self._kv_tokens.pop(name, None)
        self._router.forget(name)

    def forget(self, name: str) -> None:
        self.died(name)
        self._limits.pop(name, None)


async def engine_stats(fleet: Fleet, names: tuple[str, ...]) -> dict[str, EngineStats]:
    """Of those that respond in time: one that is frozen holds up nothing that is given to others."""
    asked = (asyncio.wait_for(fleet.state.handles[name].stats(), RESPONSE_S) for name in names)
    found = await asyncio.gather(*asked, return_exceptions=True)
    return {name: stats for name, stats in zip(names, found, strict=True) if isinstance(stats, EngineStats)}


RESUME = "`asyncrl resume` continues from the last checkpoint"
RESPONSE_S = 10.0
"""For an engine to say what it holds."""
RETRY_SECONDS = 0.5
"""Between two looks whether a process is back."""
T = TypeVar("T")
Begun = Mapping[Slot, tuple[Segment, ...]]


class EnginePool:
    def __init__(
        self, run: Run, fleet: Fleet, task: Task, recorder: Recorder, refit: Callable[[], Awaitable[object]]
    ) -> None:
        """`refit` calls `publish`, and tells everybody who has to know."""
        self._run, self._fleet, self._task, self._recorder, self._refit = run, fleet, task, recorder, refit
        self._state = fleet.state
        self.load = EngineLoad(run)
        self._one_by_one = run.elastic.on or run.concurrency.adaptive
        """Each group is a call of its own, so that what an engine holds is known to the group."""
        self._changed = asyncio.Condition()
        self._recovering: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def share(self, tickets: Sequence[Ticket], work: asyncio.TaskGroup, begun: Begun | None = None) -> None:
        """Begin to generate; waits only while no engine serves, or none may be given more."""
        waiting = deque((ticket, self._task.prompt("train", ticket.prompt_index)) for ticket in tickets)
        while waiting:
            await self._some(self._with_room)
            await self._measure()
            shares: dict[str, list[tuple[Ticket, Prompt]]] = {}
            while waiting and (free := self._with_room()):
                ticket, prompt = waiting.popleft()
                name = self.load.give(free, len(ticket.samples), prompt)
                shares.setdefault(name, []).append((ticket, prompt))
            for name, share in shares.items():
                for part in [[each] for each in share] if self._one_by_one else [share]:
                    work.create_task(self._generate(name, part, begun or {}, work))

    def _with_room(self) -> tuple[str, ...]:
        return self.load.with_room(self._state.serving)

    async def _measure(self) -> None:
        """How large the engines are, of which it is not known."""
        if len(self._state.serving) > 1 and (names := self.load.unmeasured(self._state.serving)):
            found = await engine_stats(self._fleet, names)
            for name in names:  # one that does not answer has died, and is measured when it is back
                self.load.measured(name, found[name].kv_tokens if name in found else 0)

    async def _generate(
        self, name: str, prompts: list[tuple[Ticket, Prompt]], begun: Begun, work: asyncio.TaskGroup
    ) -> None:
        tickets = [ticket for ticket, _ in prompts]
        groups = {ticket.group for ticket in tickets}
        try:
            known = {slot: parts for slot, parts in begun.items() if slot.group in groups}
            await self._state.handles[name].generate(prompts, known)
            handed_over = name in self._state.in_state("draining")
        except (ActorError, EngineError) as error:
            self.lost(name, error)
            handed_over = True
        finally:
            self.load.take_back(name, sum(len(ticket.samples) for ticket in tickets))
            await self.notify()
        if handed_over:
            missing, begun = await self._fleet.buffer.reassign(groups)
            self._recorder.moved(name, sum(len(ticket.samples) for ticket in missing))
            await self.share(missing, work, begun)

    async def _some(self, names: Callable[[], Sequence[str]]) -> tuple[str, ...]:
        """Wait until there are any."""
        async with self._changed:
            await self._changed.wait_for(lambda: names() or not self._state.hopeful)
        if not names():
            died = ", ".join(f"{name} {restarts} times" for name, restarts in self._state.restarts.items())
            raise EngineError(f"no engine is left, they died: {died} (recovery.max_restarts is the limit); {RESUME}")
        return tuple(names())

    async def publish(self) -> Published:
        """Bring the trainer's version to every engine that can be reached, which is how one that came back catches up.

        Waits while none can be. An engine that hangs ends the run; one that dies does not.
        """
        while True:
            for name in await self._some(lambda: self._state.reachable):
                self._state.include(name)
            try:
                published = await self._fleet.publisher.publish()
            except WeightSyncError:
                if not self._note_deaths():
                    raise
                continue
            self._note_deaths()
            if hung := self._state.hung:
                raise WeightSyncError(
                    f"{', '.join(sorted(hung))} did not acknowledge version {published.version}; {RESUME}"
                )
            self.load.forget_prefixes()
            await self.notify()
            return published

    def _note_deaths(self) -> bool:
        """Whether any engine died during a publication."""
        died, self._fleet.publisher.died = self._fleet.publisher.died, {}
        for name, error in died.items():
            self.lost(name, error)
        return bool(died)

    def lost(self, name: str, error: ActorError | EngineError) -> None:
        """An engine died; raises what it died of unless its process can be made anew."""
        if isinstance(error, ActorError) and error.actor != name:
            raise error  # somebody that it needed
        if not self._run.recovery.max_restarts or (isinstance(error, EngineError) and not self._end(name)):
            raise error
        if self._state.died(name):
            self._recorder.lost(name, str(error))
            self.load.died(name)
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
            names = await self._some(lambda: self._state.serving)
            try:
                with self.load.also_busy(names):
                    return await call([self._state.handles[name] for name in names])
            except ActorError as error:
                if error.actor not in names:
                    raise
                self.lost(error.actor, error)
            finally:
                await self.notify()

    def _end(self, name: str) -> bool:
        """Its engine is useless although its process lives; once is enough."""
        return name not in self._state.in_state("healthy", "stale") or spawn.end_process(self._state.handles[name])

    async def _bring_back(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._run.recovery.timeout_s):
                await self._restarted(self._state.handles[name])
        except (TimeoutError, ActorError, EngineError) as error:
            self._state.gave_up(name)
            self._fleet.factory.end(self._state.handles[name])  # it may live, and hold a GPU
            self._recorder.event("engine_gone", engine=name, reason=str(error))
            await self.notify()
            if not self._state.hopeful:
                raise EngineError(f"{name} died and did not come back: {error}; {RESUME}") from None
            return
        self._state.restarted(name)
        await self.notify()
        await self._refit()

    async def _restarted(self, actor: RolloutActor) -> None:
        while True:
            try:
                await spawn.prepare_process(actor)
                if not await actor.started():
                    await actor.start()
                    return
                # Only the connection broke. Others have its work by now, so it begins anew as a dead one does.
                spawn.end_process(actor)
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
