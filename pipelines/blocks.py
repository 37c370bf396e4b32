"""What pipelines are built from: each block is a node or an arrow of a pipeline's diagram.

    generate       prompts -> admit -> engines -> reward -> BUFFER, for as long as it is not cancelled
    fill           the same with samples that are read instead of generated
    groups         BUFFER -> complete groups, as they come, until a step has its quota
    accumulate     forward and backward on them
    update         one optimizer step; its groups are committed
    publish_soon   the new version to every engine, beside what follows; its groups' places return
    finish         what is due after a step: a checkpoint, an evaluation

The blocks keep the promises, in whatever order a pipeline calls them: no sample is older than `max_staleness`, each is
trained on once, every version is acknowledged before it counts, the run can be stopped, killed and resumed after any of
them, and whatever waits can be explained.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.fleet import Fleet
from actors.publisher import Published
from actors.trainer.actor import Accumulated
from asyncrl.config import Run
from asyncrl.data.arrow import encode
from asyncrl.errors import AsyncRLError, DivergenceError, Fp8Error, StoppedError
from asyncrl.fleet.ready_window import ReadyWindow
from asyncrl.fleet.staleness import Decision, StalenessController
from asyncrl.system.run_directory import RunDirectory
from asyncrl.tasks.base import Task
from asyncrl.training.report import StepReport
from asyncrl.types import Delivery, Ticket, Trajectory
from pipelines.evaluate import Scores, evaluate
from pipelines.fleet.elastic import ElasticPool, Waits, tune
from pipelines.fleet.engine_pool import EnginePool
from pipelines.fleet.evaluator import Evaluator
from pipelines.recording.best_weights import BestWeights
from pipelines.recording.recorder import Recorder
from pipelines.supervision.stopping import Stopping
from pipelines.supervision.watchdog import backstop


@dataclass
class _Step:
    """A step on its way."""

    number: int
    started: float = field(default_factory=time.time)
    done: list[Accumulated] = field(default_factory=list)
    waited: float = 0.0
    starved: float = 0.0


@dataclass(frozen=True)
class Updated:
    """A step that was taken."""

    step: int
    report: StepReport
    pace: Decision
    done: list[Accumulated]
    waited: float


class Blocks:
    """The blocks of one run, from `first_step` to the last."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        fleet: Fleet,
        task: Task,
        recorder: Recorder,
        stopping: Stopping,
        *,
        first_step: int,
    ) -> None:
        self.run = run
        self.directory = directory
        self.fleet = fleet
        self.task = task
        self.recorder = recorder
        self._unless_stopped = stopping.unless
        self._first_step = self._saved = self._done = first_step
        self._controller = StalenessController(run.staleness, run.max_staleness)
        self._window = ReadyWindow(run)
        for row in recorder.rows:  # a resumed run goes on where the controller was
            self._controller.observe(row)
        self._may_generate = asyncio.Event()
        self._one_version = asyncio.Lock()
        self._engines = EnginePool(run, fleet, task, recorder, self.publish)
        self._waits = Waits()
        self._step = _Step(first_step)
        self._evaluated = -1
        self._best = BestWeights(directory.best, run.evaluation.best) if run.evaluation.best else None
        self._evaluator: Evaluator | None = None
        self._tasks: asyncio.TaskGroup
        self._publishing: asyncio.Task[None] | None = None
        self._checkpoint: asyncio.Task[None] | None = None

    # The run as a whole

    @property
    def model_path(self) -> Path:
        """The model that the run began with."""
        return (self.run.model.directory or self.directory.model).resolve()

    @property
    def steps(self) -> Iterator[int]:
        """Those that are left to take, from 0."""
        return iter(range(self._first_step, self.run.steps))

    @asynccontextmanager
    async def running(self, source: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
        """Around the steps: what `source` gets into the buffer is trained on inside.

        Before them every engine gets the weights, also the first time: then it has proven that it holds what is
        trained, and the way to it is open. A run that is asked to stop leaves the step in hand, and a checkpoint of the
        last one is written.
        """
        try:
            await self._begin()
            async with self._steps(source):
                yield
        finally:
            source.close()  # if it never began
            if self._evaluator is not None:
                await self._evaluator.close()
        self.recorder.end()
        if self._evaluated != self._done:
            await self.evaluate()
        if self._best is not None:
            self._best.close()

    async def _begin(self) -> None:
        await self._unless_stopped(self.publish())
        if self.run.evaluation.beside and self._serves:
            self._evaluator = Evaluator(self.run, self.fleet, self.task, self.recorder, self._scored)
            await self._unless_stopped(self._evaluator.started())
        if not self._first_step and self._evaluator is not None:
            await self._evaluate_beside(0)
        elif not self._first_step:
            await self.evaluate()
        self.recorder.begin()

    @asynccontextmanager
    async def _steps(self, source: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
        async with asyncio.TaskGroup() as self._tasks:
            filling = self._tasks.create_task(source)
            beside = [self._tasks.create_task(each) for each in self._beside()]
            try:
                yield
            except StoppedError:
                filling.cancel()  # nothing more is admitted
                await self._save_now(self._done)
                raise
            await self._end_early()
            await self._published()
            await self._checkpointed()
            if self._evaluator is not None:
                await self._evaluator.finished()
            for task in (filling, *beside):
                task.cancel()
            await self._engines.close()

    async def _end_early(self) -> None:
        """A pipeline may end before `steps`: its last step is published and saved as the last of all steps is."""
        await self._serve_newest()
        if self.run.checkpoint.last:
            await self._save_now(self._done)

    def _beside(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._engines.watch()
        if self.run.concurrency.adaptive:
            yield tune(self.run, self.fleet, self._engines)
        if self.run.elastic.on:
            yield self._scale()
        if self.fleet.drafter is not None:
            told = self.recorder.drafter, self.recorder.drafter_lost, self.recorder.drafter_failed
            yield self.fleet.drafter.serve(*told)

    async def _scale(self) -> None:
        """Engines come and go as trainer and engines wait for each other."""
        await self._may_generate.wait()
        per_version = self.run.samples_per_step
        await ElasticPool(
            self.run,
            self.fleet,
            self._engines,
            self.recorder,
            self._waits,
            one_version=self._one_version,
            refit=self.publish,
            places=lambda: (self._controller.decision.effective_staleness + 1) * per_version,
        ).run()

    @property
    def _serves(self) -> bool:
        """Whether there are engines that get weights."""
        return self.run.rollout.replicas > 0

    # Into the buffer

    async def generate(self) -> None:
        """Admit groups as fast as places come free, and share them out over the engines."""
        async with asyncio.TaskGroup() as work:
            async for tickets in self._admitted():
                await self._engines.share(tickets, work)

    async def fill(self, read: Callable[[Ticket], Sequence[Trajectory]]) -> None:
        """Admit groups in the same way, and append what `read` has for each."""
        async for tickets in self._admitted():
            for ticket in tickets:
                samples = await asyncio.to_thread(read, ticket)
                await self.fleet.buffer.append([encode(sample) for sample in samples])

    async def _admitted(self) -> AsyncIterator[list[Ticket]]:
        await self._may_generate.wait()
        buffer = self.fleet.buffer
        tickets = await buffer.reissue()
        if samples := sum(len(ticket.samples) for ticket in tickets):
            self.recorder.regenerated(samples)
        while True:
            yield tickets
            with self._waits.rollout():
                tickets = await buffer.admit(timeout_s=self.run.flow.stall_timeout_s)

    # Out of it: a step

    async def groups(self, step: int) -> AsyncIterator[Delivery]:
        """Complete groups, `flow.groups_per_take` of them and more at a time, until the step has its quota. A resumed
        run is first given the recorded deliveries again; then generation begins."""
        self._step = now = _Step(step)
        flow, taken = self.run.flow, 0
        while taken < flow.groups_per_step:
            await self._end_replay()
            begun = time.time()
            with self._waits.trainer():
                delivery = await self._unless_stopped(
                    self.fleet.buffer.take(
                        min_groups=flow.groups_per_take,
                        max_groups=flow.groups_per_step - taken,
                        timeout_s=backstop(self.run),
                    )
                )
            now.waited += time.time() - begun
            now.starved += delivery.starved * (time.time() - begun)
            self.recorder.span("wait_batch", begun, step=step, groups=len(delivery.groups))
            taken += len(delivery.groups)
            yield delivery

    async def _end_replay(self) -> None:
        """Let generation begin once the recorded deliveries are repeated and their last version is served."""
        if not self._may_generate.is_set():
            await self._published()
            if not await self.fleet.buffer.replaying():
                self._may_generate.set()

    async def accumulate(self, delivery: Delivery) -> Accumulated:
        """Forward and backward, while other groups are still being generated."""
        done = await self.fleet.trainer.accumulate(delivery)
        self._step.done.append(done)
        self.recorder.span("train", done.started, step=self._step.number, groups=len(delivery.groups))
        return done

    async def update(self) -> Updated:
        """Take the step. With `staleness=ess` or `kl` the controller then narrows how old samples may be, and which
        steps are published."""
        now, begun = self._step, time.time()
        await self._published()
        self.recorder.span("wait_sync", begun, step=now.number)
        begun = time.time()
        try:
            report = await self.fleet.trainer.step()
        except Fp8Error:  # the run starts again by itself
            raise
        except DivergenceError:
            await self._save_before(now.number)
            raise
        self.recorder.span("update", begun, step=now.number)
        await self.fleet.buffer.commit(now.number)
        self._done = now.number + 1
        pace = self._controller.observe(report.figures)
        if self._may_generate.is_set():  # a replay waits for nobody
            seconds = time.time() - now.started
            self._window.observe(now.waited / seconds, now.starved / seconds)
        await self.fleet.buffer.limit(pace.effective_staleness, self._window.groups)
        return Updated(now.number, report, pace, now.done, now.waited)

    # A new version

    def publish_soon(self, updated: Updated) -> None:
        """Publish, if it is time, while the trainer goes on with the next step's early groups; take the step down."""
        self._publishing = self._tasks.create_task(self._after_update(updated))

    async def _after_update(self, updated: Updated) -> None:
        report, pace = updated.report, updated.pace
        published = await self.publish() if self._is_due(report.version, pace) else None
        figures = updated.done, updated.waited, self._window.groups, self.fleet
        await self.recorder.step(updated.step, report, pace, published, *figures)
        if self._evaluator is not None and self._evaluates_after(report.version):
            await self._evaluate_beside(report.version)

    def _is_due(self, version: int, pace: Decision) -> bool:
        """Evaluations judge the newest weights, and a replay, which nobody generates in, ends with them served."""
        return (
            not self._serves
            or version - self.fleet.state.published_version >= pace.publish_every
            or version == self.run.steps
            or self._evaluates_after(version)
            or not self._may_generate.is_set()
        )

    async def publish(self) -> Published | None:
        """Bring the trainer's version to every engine; places for new groups return with it. Without engines they
        return at once."""
        if not self._serves:
            await self.fleet.buffer.advance(self._done)
            return None
        async with self._one_version:
            begun = time.time()
            published = await self._engines.publish()
            await self.fleet.buffer.advance(published.version)
            self.recorder.span("publish", begun, version=published.version)
            return published

    async def _published(self) -> None:
        """Wait until the last publication is over: engines get every one, one after the other."""
        if self._publishing is not None:
            await self._publishing

    # After a step

    async def finish(self, step: int) -> None:
        """A checkpoint and an evaluation, if they are due. The checkpoint is written while the trainer goes on."""
        steps_done = step + 1
        every, ends = self.run.checkpoint.every, steps_done == self.run.steps
        wanted = self._best is not None and self._evaluates_after(steps_done)
        if (self.run.checkpoint.last and ends) or (every and steps_done % every == 0) or wanted:
            begun = await self._begin_checkpoint(steps_done)
            self._checkpoint = self._tasks.create_task(self._end_checkpoint(steps_done, begun))
        if self._evaluates_after(steps_done) and not ends and self._evaluator is None:
            await self.evaluate()

    async def _begin_checkpoint(self, steps_done: int) -> float:
        """Copy what it holds, which is written while the trainer goes on; returns when that began."""
        await self._published()
        await self._checkpointed()
        # First: a resumed run has the rows up to the checkpoint it starts from.
        await asyncio.to_thread(self.recorder.write_metrics)
        begun = time.time()
        await self.fleet.trainer.save()
        await self.recorder.learned(self.fleet)
        if self.fleet.drafter is not None:
            await self.fleet.drafter.save()
        self.recorder.span("checkpoint", begun, step=steps_done)
        return begun

    async def _end_checkpoint(self, steps_done: int, begun: float) -> None:
        oldest = await self.fleet.trainer.saved()
        self._saved = steps_done
        self.recorder.span("checkpoint_written", begun, step=steps_done)
        if self._best is not None:
            self._best.saved(steps_done, self.directory.checkpoints / f"step-{steps_done}")
        self.recorder.pruned(await self.fleet.buffer.checkpointed(oldest))

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
        return bool(self.run.checkpoint.every) or self.run.checkpoint.last

    def _evaluates_after(self, steps_done: int) -> bool:
        every = self.run.evaluation.every
        return bool(every) and steps_done % every == 0

    async def evaluate(self) -> Scores | None:
        """The held-out scores of the newest weights; None where nothing is held out, or nobody generates."""
        if not self._serves:
            return None
        await self._serve_newest()
        begun, steps_done = time.time(), self._done
        asking = self._engines.repeat(lambda engines: evaluate(self.run, engines, self.task))
        scores = await self._unless_stopped(asking)
        if scores is not None:
            self.recorder.evaluation(steps_done, begun, scores)
            self._scored(steps_done, scores)
        return scores

    async def _evaluate_beside(self, steps_done: int) -> None:
        """The trainer has not gone on from this version yet."""
        assert self._evaluator is not None
        async with self._one_version:
            await self._evaluator.begin(steps_done)

    def _scored(self, steps_done: int, scores: Scores) -> None:
        self._evaluated = steps_done
        if self._best is not None and steps_done:  # the first weights are in the model's own directory
            self._best.scored(steps_done, scores)

    def is_evaluated(self, steps_done: int) -> bool:
        """Whether an evaluation is due before the next step: by `evaluation.every`, and before the first."""
        return not steps_done or self._evaluates_after(steps_done)

    async def held_out_loss(self, samples: Sequence[Trajectory]) -> float | None:
        """Of the trainer's weights, on samples of which nothing is learned."""
        if not samples:
            return None
        begun = time.time()
        loss = await self._unless_stopped(self.fleet.trainer.loss(list(samples)))
        self.recorder.held_out_loss(self._done, begun, loss)
        return loss

    async def _serve_newest(self) -> None:
        """Wait until engines have what was trained last."""
        await self._published()
        if self._serves and self.fleet.state.published_version < self._done:
            await self.publish()
