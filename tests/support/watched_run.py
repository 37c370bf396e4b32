"""A small run inside the test's own process, whose watchdog tells what it finds and lets the run go on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path

from actors.runtime.spawn import Spawner
from asyncrl.config import Run
from asyncrl.observe.diagnosis.snapshot import Explanation
from asyncrl.system.run_directory import RunDirectory
from pipelines import train
from pipelines.compose import compose
from pipelines.fleet.cluster_offer import here
from pipelines.recording.progress import Progress
from pipelines.recording.recorder import Recorder
from pipelines.supervision.stopping import Stopping
from pipelines.supervision.watchdog import Watchdog

PATIENCE_S = 90.0
"""Of the tests themselves, on a machine that others use as well."""


class Telling(Watchdog):
    """Notes what it found; what was stopped goes on afterwards, and so does the run."""

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        super().__init__(run, directory, lambda _: None, lambda kind, fields: None, lambda *_: None)
        self.found: list[Explanation] = []

    def end(self, explanation: Explanation, *, hopeless: bool) -> None:
        self.found.append(explanation)
        self.progress("the test")

    async def pid(self, name: str) -> int:
        await until(lambda: name in self._observer._reports)
        return self._observer._reports[name].pid

    async def next(self) -> Explanation:
        """The explanation of what the test has just done; one that was under way before is passed over."""
        known = len(self.found)
        await until(lambda: len(self.found) > known)
        return self.found[known]


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def small(root: Path, model: Path, *overrides: str) -> Run:
    return compose(
        (
            "experiment=quickstart",
            "model=checkpoint",
            f"model.path={model}",
            "steps=100000",
            "flow.groups_per_step=4",
            "flow.groups_per_take=1",
            "rollout.group_size=4",
            "rollout.max_tokens=24",
            "evaluation.prompts=0",
            "checkpoint.every=0",
            f"root={root}",
            "name=run",
            *overrides,
        )
    )


Scenario = Callable[[Telling, Recorder], Awaitable[None]]


def play(run: Run, model: Path, spawner: Spawner, scenario: Scenario) -> None:
    """Run the pipeline until the scenario is over; an error of either is raised."""
    directory = RunDirectory.create(Path(run.root) / run.name)
    run = train.prepare_head(run, directory, model)
    with ExitStack() as after, Progress(run) as progress:
        after.callback(spawner.clear)
        recorder = Recorder(run, directory, progress, first_step=0)
        with closing(recorder), Telling(run, directory) as watchdog:
            asyncio.run(_beside(run, directory, recorder, model, watchdog, spawner, scenario))


async def _beside(
    run: Run,
    directory: RunDirectory,
    recorder: Recorder,
    model: Path,
    watchdog: Telling,
    spawner: Spawner,
    scenario: Scenario,
) -> None:
    spawner, stopping = watchdog.over(spawner), Stopping(run, print, print)
    work = train._train(run, here(run), directory, recorder, spawner, model, None, stopping, resumed=False)
    running = asyncio.create_task(watchdog.guard(work))
    playing = asyncio.ensure_future(scenario(watchdog, recorder))
    await asyncio.wait({running, playing}, return_when=asyncio.FIRST_COMPLETED)
    ended = [task for task in (running, playing) if task.done()]
    for task in (running, playing):
        task.cancel()
    await asyncio.wait({running, playing})
    for task in ended:
        task.result()
