"""Asynchronous GRPO.

    prompts -> admit -> generate (rollout actors) -> reward -> BUFFER -> accumulate -> step -> publish -+
                 ^            ^                                          (as groups come)               |
                 |            +----------------------- weights, version v -----------------------------+
                 +------------------------------------ places return ----------------------------------+

Back-pressure: `generate` waits in buffer.admit, which gives a place only where the group can still be trained on
within `max_staleness` versions; `train` waits in buffer.take for the next complete groups. `max_staleness=0` is the
synchronous loop: a place is given only after the weights that the group will be trained against were published.
With `staleness=ess` or `kl` a controller narrows both after each step: the bound that places are given under, and
which steps are published.
A resumed run first replays the recorded deliveries, then generation begins.
A run that is asked to stop does so where it waits for groups: the step in hand is left, and a checkpoint of the last
one written. A resumed run is delivered the same groups again.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any

from actors.fleet import Fleet
from actors.publisher import Published
from actors.trainer.actor import Accumulated
from asyncrl.config import Run
from asyncrl.errors import AsyncRLError, DivergenceError, Fp8Error, StoppedError
from asyncrl.fleet.ready_window import ReadyWindow
from asyncrl.fleet.staleness import Decision, StalenessController
from asyncrl.tasks.base import Task
from asyncrl.training.report import StepReport
from pipelines.evaluate import evaluate
from pipelines.fleet.elastic import ElasticPool, Waits, tune
from pipelines.fleet.engine_pool import EnginePool
from pipelines.recording.recorder import Recorder
from pipelines.supervision.stopping import Stopping
from pipelines.supervision.watchdog import backstop


class AsyncGrpo:
    """One run of the loop, from `first_step` to the last."""

    def __init__(
        self, run: Run, fleet: Fleet, task: Task, recorder: Recorder, stopping: Stopping, *, first_step: int
    ) -> None:
        self._run = run
        self._fleet = fleet
        self._task = task
        self._recorder = recorder
        self._unless_stopped = stopping.unless
        self._first_step = self._saved = self._done = first_step
        self._controller = StalenessController(run.staleness, run.max_staleness)
        self._window = ReadyWindow(run)
        for row in recorder.rows:  # a resumed run goes on where the controller was
            self._controller.observe(row)
        self._may_generate = asyncio.Event()
        self._one_version = asyncio.Lock()
        self._engines = EnginePool(run, fleet, task, recorder, self._publish)
        self._waits = Waits()
        self._publishing: asyncio.Task[None] | None = None
        self._checkpoint: asyncio.Task[None] | None = None

    async def run(self) -> None:
        # Also the first time: then engines have proven that they hold what is trained, and the way to them is open.
        await self._unless_stopped(self._publish())
        if not self._first_step:
            await self._evaluate(0)
        self._recorder.begin()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._generate()), tasks.create_task(self._engines.watch())]
            beside += [tasks.create_task(each) for each in self._scaling()]
            if self._fleet.drafter is not None:
                told = self._recorder.drafter, self._recorder.drafter_lost, self._recorder.drafter_failed
                beside.append(tasks.create_task(self._fleet.drafter.serve(*told)))
            try:
                for step in range(self._first_step, self._run.steps):
                    await self._train_step(step, tasks)
                    await self._after_step(step + 1, tasks)
            except StoppedError:
                beside[0].cancel()  # nothing more is admitted
                await self._save_now(self._done)
                raise
            await self._published()
            await self._checkpointed()
            for task in beside:
                task.cancel()
            await self._engines.close()
        self._recorder.end()
        await self._evaluate(self._run.steps)

    def _scaling(self) -> Iterator[Coroutine[Any, Any, None]]:
        if self._run.concurrency.adaptive:
            yield tune(self._run, self._fleet, self._engines)
        if self._run.elastic.on:
            yield self._scale()

    async def _scale(self) -> None:
        """Engines come and go as trainer and engines wait for each other."""
        await self._may_generate.wait()
        per_version = self._run.samples_per_step
        await ElasticPool(
            self._run,
            self._fleet,
            self._engines,
            self._recorder,
            self._waits,
            one_version=self._one_version,
            refit=self._publish,
            places=lambda: (self._controller.decision.effective_staleness + 1) * per_version,
        ).run()

    async def _generate(self) -> None:
        """Admit groups as fast as places come free, and share them out over the engines."""
        await self._may_generate.wait()
        buffer = self._fleet.buffer
        async with asyncio.TaskGroup() as work:
            tickets = await buffer.reissue()
            while True:
                await self._engines.share(tickets, work)
                with self._waits.rollout():
                    tickets = await buffer.admit(timeout_s=self._run.flow.stall_timeout_s)

    async def _train_step(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Forward and backward on complete groups while the rest is generated; one update when the quota is in."""
        flow, fleet = self._run.flow, self._fleet
        done: list[Accumulated] = []
        started, waited, starved, taken = time.time(), 0.0, 0.0, 0
        while taken < flow.groups_per_step:
            await self._end_replay()
            begun = time.time()
            with self._waits.trainer():
                delivery = await self._unless_stopped(
                    fleet.buffer.take(
                        min_groups=flow.groups_per_take,
                        max_groups=flow.groups_per_step - taken,
                        timeout_s=backstop(self._run),
                    )
                )
            waited += time.time() - begun
            starved += delivery.starved * (time.time() - begun)
            self._recorder.span("wait_batch", begun, step=step, groups=len(delivery.groups))
            done.append(await fleet.trainer.accumulate(delivery))
            self._recorder.span("train", done[-1].started, step=step, groups=len(delivery.groups))
            taken += len(delivery.groups)
        begun = time.time()
        await self._published()
        self._recorder.span("wait_sync", begun, step=step)
        begun = time.time()
        try:
            report = await fleet.trainer.step()
        except Fp8Error:  # the run starts again by itself
            raise
        except DivergenceError:
            await self._save_before(step)
            raise
        self._recorder.span("update", begun, step=step)
        await fleet.buffer.commit(step)
        self._done = step + 1
        pace = self._controller.observe(report.figures)
        if self._may_generate.is_set():  # a replay waits for nobody
            seconds = time.time() - started
            self._window.observe(waited / seconds, starved / seconds)
        await fleet.buffer.limit(pace.effective_staleness, self._window.groups)
        self._publishing = tasks.create_task(self._after_update(step, report, pace, done, waited))

    async def _end_replay(self) -> None:
        """Let generation begin once the recorded deliveries are repeated and their last version is served."""
        if not self._may_generate.is_set():
            await self._published()
            if not await self._fleet.buffer.replaying():
                self._may_generate.set()

    async def _after_update(
        self, step: int, report: StepReport, pace: Decision, done: list[Accumulated], waited: float
    ) -> None:
        """Publish, if it is time, while the trainer goes on with the next step's early groups; take the step down."""
        published = await self._publish() if self._is_due(report.version, pace) else None
        await self._recorder.step(step, report, pace, published, done, waited, self._window.groups, self._fleet)

    def _is_due(self, version: int, pace: Decision) -> bool:
        """Evaluations judge the newest weights, and a replay, which nobody generates in, ends with them served."""
        return (
            version - self._fleet.state.published_version >= pace.publish_every
            or version == self._run.steps
            or self._evaluates_after(version)
            or not self._may_generate.is_set()
        )

    async def _publish(self) -> Published:
        """Bring the trainer's version to every engine; places for new groups return with it."""
        async with self._one_version:
            begun = time.time()
            published = await self._engines.publish()
            await self._fleet.buffer.advance(published.version)
            self._recorder.span("publish", begun, version=published.version)
            return published

    async def _published(self) -> None:
        """Wait until the last publication is over: engines get every one, one after the other."""
        if self._publishing is not None:
            await self._publishing

    async def _after_step(self, steps_done: int, tasks: asyncio.TaskGroup) -> None:
        every, ends = self._run.checkpoint.every, steps_done == self._run.steps
        if (self._run.checkpoint.last and ends) or (every and steps_done % every == 0):
            begun = await self._begin_checkpoint(steps_done)
            self._checkpoint = tasks.create_task(self._end_checkpoint(steps_done, begun))
        if self._evaluates_after(steps_done) and steps_done < self._run.steps:
            await self._published()
            await self._evaluate(steps_done)

    async def _begin_checkpoint(self, steps_done: int) -> float:
        """Copy what it holds, which is written while the trainer goes on; returns when that began."""
        await self._published()
        await self._checkpointed()
        # First: a resumed run has the rows up to the checkpoint it starts from.
        await asyncio.to_thread(self._recorder.write_metrics)
        begun = time.time()
        await self._fleet.trainer.save()
        await self._recorder.learned(self._fleet)
        if self._fleet.drafter is not None:
            await self._fleet.drafter.save()
        self._recorder.span("checkpoint", begun, step=steps_done)
        return begun

    async def _end_checkpoint(self, steps_done: int, begun: float) -> None:
        oldest = await self._fleet.trainer.saved()
        self._saved = steps_done
        self._recorder.span("checkpoint_written", begun, step=steps_done)
        self._recorder.pruned(await self._fleet.buffer.checkpointed(oldest))

    async def _checkpointed(self) -> None:
        """Wait until the last checkpoint is durable."""
        if self._checkpoint is not None:
            await self._checkpoint

    async def _save_before(self, step: int) -> None:
        """The weights before a step that was refused: with other settings a resumed run goes on from there, and takes
        no step again that was taken with the old ones."""
        with suppress(AsyncRLError, OSError):  # why the run stops is worth more than the checkpoint
            await self._save_now(step)

    async def _save_now(self, steps_done: int) -> None:
        """Have a checkpoint of this step, if the run writes any."""
        await self._checkpointed()
        if steps_done != self._saved and self._saves:
            await self._end_checkpoint(steps_done, await self._begin_checkpoint(steps_done))

    @property
    def _saves(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return bool(self._run.checkpoint.every) or self._run.checkpoint.last

    def _evaluates_after(self, steps_done: int) -> bool:
        every = self._run.evaluation.every
        return bool(every) and steps_done % every == 0

    async def _evaluate(self, steps_done: int) -> None:
        begun = time.time()
        asking = self._engines.repeat(lambda engines: evaluate(self._run, engines, self._task))
        scores = await self._unless_stopped(asking)
        if scores is not None:
            self._recorder.evaluation(steps_done, begun, scores)
