"""An engine of its own for evaluations, with which training goes on meanwhile (`evaluation.beside`).

    begin(version) -> the trainer sends its weights to this engine alone -> held-out prompts -> scores
                      (before its next step, so that the engine has just this version)

It keeps that version until the next evaluation begins. One that is due while another still runs is left out. An
evaluation that fails is told and ends nothing: the next has a new engine.
"""

import asyncio
import time
from collections.abc import Callable

from actors.fleet import Fleet, close_actor
from actors.publisher import Publisher
from actors.rollout.actor import RolloutActor
from asyncrl.config import Run
from asyncrl.errors import AsyncRLError
from asyncrl.fleet.state import FleetState
from asyncrl.tasks.base import Task
from pipelines.evaluate import Scores, evaluate
from pipelines.recording.recorder import Recorder
from pipelines.supervision.watchdog import backstop


class Evaluator:
    def __init__(
        self, run: Run, fleet: Fleet, task: Task, recorder: Recorder, scored: Callable[[int, Scores], None]
    ) -> None:
        """`scored` is told of each evaluation after it was recorded."""
        self._run, self._fleet, self._task, self._recorder, self._scored = run, fleet, task, recorder, scored
        self._engines = 0
        self._starting: asyncio.Task[RolloutActor] = asyncio.create_task(self._start())
        self._evaluating: asyncio.Task[None] | None = None
        self._step = 0
        """Of the last evaluation that began."""

    async def _start(self) -> RolloutActor:
        name = f"evaluator-{self._engines}"
        self._engines += 1
        engine = await self._fleet.factory.place_engine(name)
        await engine.start()
        timeout_s = backstop(self._run)
        self._publisher = Publisher(
            self._fleet.trainer,
            FleetState({name: engine}),
            deadline_s=self._run.weights.deadline_s,
            export_s=timeout_s,
            required=1,
        )
        return engine

    async def started(self) -> None:
        await asyncio.wait([self._starting])

    async def begin(self, step: int) -> None:
        """Returns when the engine has the trainer's version; nothing else may be published meanwhile."""
        if self._evaluating is not None and not self._evaluating.done():
            return self._recorder.evaluation_left_out(step, f"that of step {self._step} still runs")
        if not self._starting.done():
            return self._recorder.evaluation_left_out(step, "its engine is still being started")
        try:
            engine = self._starting.result()
            await self._publisher.publish()
        except AsyncRLError as error:
            return self._failed(step, error)
        self._step = step
        self._evaluating = asyncio.create_task(self._evaluate(step, engine))

    async def _evaluate(self, step: int, engine: RolloutActor) -> None:
        begun = time.time()
        try:
            scores = await evaluate(self._run, [engine], self._task)
        except AsyncRLError as error:
            return self._failed(step, error)
        if scores is not None:
            self._recorder.evaluation(step, begun, scores, beside=True)
            self._scored(step, scores)

    def _failed(self, step: int, error: AsyncRLError) -> None:
        self._recorder.evaluation_left_out(step, str(error))
        if not self._starting.cancelled() and self._starting.exception() is None:
            self._fleet.factory.end(self._starting.result())  # it may live
        self._starting = asyncio.create_task(self._start())

    async def finished(self) -> None:
        """Wait for the evaluation that is under way."""
        if self._evaluating is not None:
            await self._evaluating

    async def close(self) -> None:
        under_way = [task for task in (self._evaluating, self._starting) if task is not None]
        for task in under_way:
            task.cancel()  # one that is over stays as it is
        await asyncio.wait(under_way)
        if not self._starting.cancelled() and self._starting.exception() is None:
            await close_actor(self._starting.result().close())
