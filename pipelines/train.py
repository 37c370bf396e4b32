"""From a config to a finished run directory: prepare, place the actors, run the pipeline, write the summary.

The same two functions serve the command line and Python: `train(run)` and `resume(directory)`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape

from actors.fleet import write_pid_file
from actors.runtime.spawn import Spawner, cluster
from asyncrl.buffer.log import lock_directory
from asyncrl.config import Run
from asyncrl.config import trackers as tracking
from asyncrl.config.precision import without_fp8
from asyncrl.errors import (
    ActorError,
    AsyncRLError,
    ConfigError,
    EndOfDataError,
    Fp8Error,
    MissingDependencyError,
    RayError,
    StoppedError,
    first_cause,
)
from asyncrl.fleet.placement import CPU, HERE, Offer
from asyncrl.observe.environment import environment
from asyncrl.system.run_directory import RunDirectory, owner_only, replace
from asyncrl.tasks.base import Split, Task, sizes
from asyncrl.tasks.registry import make_task
from asyncrl.training.checkpoint_manifest import numbered, set_damaged_aside
from asyncrl.types import Prompt
from pipelines.blocks import Blocks
from pipelines.compose import changed, from_yaml, to_yaml
from pipelines.fleet import cluster_offer
from pipelines.fleet.place import place
from pipelines.plan import preflight
from pipelines.plan.trial import tried
from pipelines.recording import earlier_settings, summary
from pipelines.recording.notebook import make_progress
from pipelines.recording.progress import Progress
from pipelines.recording.recorder import Recorder
from pipelines.registry import run_pipeline
from pipelines.supervision import supervisor
from pipelines.supervision.function_watch import watching_functions
from pipelines.supervision.ray_watch import heeding_drains, watching_ray
from pipelines.supervision.stopping import Stopping
from pipelines.supervision.thread_runner import run_loop
from pipelines.supervision.watchdog import Watchdog

RESUMABLE = (
    *("max_staleness", "staleness", "correction", "sentinel", "checkpoint", "recovery", "rollout.precision"),
    *("rollout.router_replay", "buffer.keep", "events", "flow.incomplete", "flow.incomplete_min"),
    *(f"trainer.{name}" for name in ("lr", "warmup_steps", "decay_steps", "grad_clip")),
    *("distill.coefficient", "distill.reward"),  # what teachers said is stored: only how it is weighed changes
    *(f"reward.judge.{name}" for name in ("url", "api_key_env", "concurrency", "timeout_s", "deadline_s", "retries")),
    *(f"reward.judge.{name}" for name in ("backoff_s", "max_calls", "max_tokens", "when_spent", "cache_bytes")),
)
"""What a resumed run may change. Recorded samples fix the rest: how they were sampled, and in what groups."""


def prepare_head(run: Run, directory: RunDirectory, model_path: Path) -> Run:
    """The run with the path of its draft head: the user's, the run's own from an earlier attempt, or a fresh one. It
    lies with the run, where its drafter saves the trained one."""
    drafter = run.drafter.head
    if drafter is None:
        return run
    from asyncrl.drafting.checkpoint import fresh_head, load_head, save_head  # torch, which a plan does without
    from asyncrl.models.config import read_config

    if not (directory.drafter / "config.json").is_file():
        config = read_config(model_path)
        head = load_head(drafter.path, config) if drafter.path else fresh_head(drafter, config, run.seed)
        save_head(head, directory.drafter)
    path = str(directory.drafter.resolve())
    return msgspec.structs.replace(run, drafter=msgspec.structs.replace(drafter, path=path))


def train(run: Run) -> int:
    """Train from the start; returns the exit code."""
    preflight(run)
    preflight(run, cluster_offer.look(run))  # a cluster is queried only for a run that is possible
    told = tried(run)
    directory = RunDirectory.create(Path(run.root) / run.name)
    with directory.in_use():
        replace(directory.config, to_yaml(run).encode())
        return _run(run, directory, resumed=False, say=told)


def resume(path: Path, overrides: Sequence[str] = ()) -> int:
    """Continue a stopped or killed run from its directory, perhaps with some settings changed from its newest
    checkpoint on; returns the exit code."""
    directory = RunDirectory.open(path)
    if summary.kind(directory) == "replay":
        raise ConfigError(f"{path} was written by a replay and has nothing to resume; replay into another directory")
    with directory.in_use():  # before anything is written: the run may be alive
        run = _changed(from_yaml(directory.config), overrides)
        for problem in tracking.problems(run.trackers, run.cluster):
            raise MissingDependencyError(problem)
        directory.close_to_others()
        damaged = _keep_settings(run, directory, changes=bool(overrides))
        return _run(run, directory, resumed=True, changes=overrides, damaged=damaged)


def _keep_settings(run: Run, directory: RunDirectory, *, changes: bool) -> list[str]:
    """Write down which settings hold from the newest sound checkpoint on, and which did before; not those of a live
    run. Returns what is wrong with newer checkpoints."""
    with owner_only():
        lock = lock_directory(directory.trajectories)
        try:
            damaged = set_damaged_aside(directory.checkpoints)
            saved = numbered(directory.checkpoints)
            earlier_settings.keep(directory, saved[-1][0] if saved else 0, changes=changes)
            if changes:
                replace(directory.config, to_yaml(run).encode())
        finally:
            os.close(lock)
    return damaged


def _changed(run: Run, overrides: Sequence[str]) -> Run:
    if not overrides:
        return run
    found = changed(run, overrides, allowed=RESUMABLE)
    if found.max_staleness > run.max_staleness:
        raise ConfigError(
            f"max_staleness={found.max_staleness}: samples of this run were admitted under max_staleness="
            f"{run.max_staleness}; a resumed run can lower it, not raise it"
        )
    return found


def _run(
    run: Run,
    directory: RunDirectory,
    *,
    resumed: bool,
    changes: Sequence[str] = (),
    damaged: Sequence[str] = (),
    say: Sequence[str] = (),
) -> int:
    """`say`: what is known already and to be told first."""

    def at_exit(status: str, error: str) -> None:
        summary.write(directory, attempt.recorder, status=status, error=error)

    def lost(sentence: str) -> None:
        """Ray is, and nothing of it can be closed any more."""
        said = f"{sentence}; continue with: asyncrl resume {directory.path}"
        supervisor.leave(said, RayError.exit_code, lambda: at_exit("failed", f"RayError: {sentence}"))

    supervisor.tell(run, directory.path)
    with owner_only(), make_progress(run) as progress:
        progress.say(f"run directory {directory.path}")
        for line in say:
            progress.say(escape(line))
        stopping = Stopping(run, progress.say, lambda reason: at_exit("interrupted", f"StoppedError: {reason}"))
        attempt = _Attempt(run, directory, progress, stopping, resumed=resumed)
        try:
            with stopping.listening():
                attempt.recorder.event("environment", found=environment())
                if changes:
                    attempt.recorder.changed(changes)
                attempt.recorder.damaged(damaged)
                model_path = _model(run, directory, progress)
                run = prepare_head(run, directory, model_path)
                watchdog = Watchdog(
                    run,
                    directory,
                    progress.say,
                    lambda kind, fields: attempt.recorder.event(kind, **fields),
                    at_exit,
                )
                cpus = cluster_offer.here(run).total[CPU]
                with watchdog, cluster(run.cluster, cpus=cpus) as spawner, watching_ray(lost):
                    stopping.listen()
                    offer = cluster_offer.here(run) if run.cluster in HERE else cluster_offer.offered()
                    if coming := cluster_offer.awaited(run, offer):
                        progress.say(f"the cluster is to bring {coming} more")
                    run = cluster_offer.settled(run, offer)
                    while (figures := attempt.make(run, offer, spawner, model_path, watchdog)) is None:
                        spawner.clear()
                        run = without_fp8(run) if attempt.left_fp8 else run
                        attempt = attempt.next()
                    stopping.over()
        except BaseException as error:
            cause = first_cause(error)
            if stopping.explains(cause):
                cause = StoppedError(_how_to_go_on(directory, stopping.reason))
            status = "interrupted" if isinstance(cause, (KeyboardInterrupt, StoppedError)) else "failed"
            summary.write(directory, attempt.recorder, status=status, error=f"{type(cause).__name__}: {cause}")
            if isinstance(cause, AsyncRLError):
                raise cause from None
            raise
        finally:
            attempt.recorder.close()
        progress.say(summary.sentence(figures))
    return 0


def _how_to_go_on(directory: RunDirectory, reason: str) -> str:
    saved = numbered(directory.checkpoints)
    done = f"with a checkpoint of step {saved[-1][0]}" if saved else "before its first checkpoint"
    return f"stopped by {reason} {done}; continue with: asyncrl resume {directory.path}"


class _Attempt:
    """From the newest checkpoint to the end, or to the death of an actor that the run cannot do without."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        progress: Progress,
        stopping: Stopping,
        *,
        resumed: bool,
        number: int = 0,
    ) -> None:
        self._run, self._directory, self._progress, self._stopping = run, directory, progress, stopping
        self._resumed, self._number, self.left_fp8 = resumed, number, False
        saved = numbered(directory.checkpoints) if resumed else []
        self._restore_from = saved[-1] if saved else None
        self.recorder = Recorder(run, directory, progress, first_step=saved[-1][0] if saved else 0)

    def make(
        self, run: Run, offer: Offer, spawner: Spawner, model_path: Path, watchdog: Watchdog
    ) -> dict[str, Any] | None:
        """The run's figures; None if another attempt follows."""
        watched = watchdog.over(spawner)
        training = _train(
            run,
            offer,
            self._directory,
            self.recorder,
            watched,
            model_path,
            self._restore_from,
            self._stopping,
            resumed=self._resumed,
        )
        try:
            return run_loop(watchdog.guard(self._stopping.during(training)))
        except (ActorError, Fp8Error, ExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, Fp8Error):
                return self._leave_fp8(str(cause))
            if not isinstance(cause, ActorError) or self._number >= run.recovery.max_restarts or self._stopping.reason:
                raise
            self.recorder.restart(str(cause))
            return None

    def _leave_fp8(self, reason: str) -> None:
        """Changes the settings of the run, so that a resumed run has no FP8 either."""
        self._run, self.left_fp8 = without_fp8(self._run), True
        replace(self._directory.config, to_yaml(self._run).encode())
        self.recorder.fp8_left(reason)

    def next(self) -> "_Attempt":
        self.recorder.damaged(set_damaged_aside(self._directory.checkpoints))
        self.recorder.close()
        number = self._number + 1
        return _Attempt(self._run, self._directory, self._progress, self._stopping, resumed=True, number=number)


class EndlessTask:
    """A task that must not run out of prompts: if it does, the error says so instead of a bare StopIteration."""

    def __init__(self, task: Task, run: Run) -> None:
        self._task = task
        self._run = run

    def prompt(self, split: Split, index: int) -> Prompt:
        try:
            return self._task.prompt(split, index)
        except (StopIteration, IndexError, KeyError) as end:
            steps, groups = self._run.steps, self._run.flow.groups_per_step
            raise EndOfDataError(
                f"the prompts have ended: the task has no {split} prompt {index} ({type(end).__name__}: {end}), and "
                f"steps={steps} of {groups} groups take {steps * groups} at least; let it begin again from the first, "
                "or lower steps"
            ) from None


def _model(run: Run, directory: RunDirectory, progress: Progress) -> Path:
    """The directory of the starting weights; a warm start is made once and kept with the run."""
    if (given := run.model.directory) is not None:
        return given.resolve()
    if (settings := run.model.warm_start) is not None and not directory.model.exists():
        from asyncrl.training.warm_start import make_model

        progress.say(f"warm start: {settings.steps} supervised steps on noisy worked examples")
        scratch = directory.model.with_name(".model.partial")  # a killed run leaves no half of a model
        make_model(settings, run.task, run.seed, scratch, progress.warm_start).rename(directory.model)
    return directory.model.resolve()


async def _train(
    run: Run,
    offer: Offer,
    directory: RunDirectory,
    recorder: Recorder,
    spawner: Spawner,
    model_path: Path,
    restore_from: tuple[int, Path] | None,
    stopping: Stopping,
    *,
    resumed: bool,
) -> dict[str, Any]:
    first_step = restore_from[0] if restore_from else 0
    restore_step = first_step if resumed else None
    task = make_task(run.task, run.seed)
    async with cluster_offer.in_time(run, offer):
        placing = place(run, offer, directory, spawner, model_path, restore_step=restore_step, sizes=sizes(task))
        fleet = await stopping.unless(placing)
    await write_pid_file(fleet, directory.actors)
    recorder.event("fleet_started", first_step=first_step)
    try:
        if restore_from:
            await stopping.unless(fleet.trainer.restore(restore_from[1]))
        watching = watching_functions(fleet.callers, recorder, directory.path)
        async with heeding_drains(run.cluster, fleet, stopping), watching:
            blocks = Blocks(run, directory, fleet, EndlessTask(task, run), recorder, stopping, first_step=first_step)
            await run_pipeline(blocks)
    finally:
        ledger, waste = await fleet.close()  # before it, engines may still store what they are about to finish
    return summary.write(directory, recorder, status="ok", ledger=ledger, waste=waste)
