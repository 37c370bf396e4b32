"""From a config to a finished run directory: prepare, place the actors, run the pipeline, sum up.

The same two functions serve the command line and Python: `train(run)` and `resume(directory)`.
"""

import asyncio
from pathlib import Path
from typing import Any

from actors.buffer import BufferActor
from actors.drafter import DrafterActor
from actors.drafter_link import DrafterLink
from actors.fleet import Fleet
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.spawn import Resources, Spawner, cluster
from actors.trainer import TrainerActor
from asyncrl.config import Checkpoint, Run, WarmStart
from asyncrl.drafting.settings import Eagle3Drafter, EagleDrafter
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.rundir import RunDirectory, replace
from asyncrl.tasks.base import make_task
from asyncrl.training import checkpoint
from pipelines import starting_head, summary
from pipelines.async_grpo import AsyncGrpo
from pipelines.compose import from_yaml, to_yaml
from pipelines.plan import preflight
from pipelines.progress import Progress
from pipelines.recorder import Recorder

CONTROL = Resources(cpus=0.0)
IDLE = Resources(cpus=0.0, idle_priority=True)
COMPUTE = Resources(cpus=1.0)


def train(run: Run) -> int:
    """Train from the start; returns the exit code."""
    preflight(run)
    directory = RunDirectory.create(Path(run.root) / run.name)
    replace(directory.config, to_yaml(run).encode())
    return _run(run, directory, restore_from=None, resumed=False)


def resume(path: Path) -> int:
    """Continue a stopped or killed run from its directory; returns the exit code."""
    directory = RunDirectory.open(path)
    if summary.kind(directory) == "replay":
        raise ConfigError(f"{path} was written by a replay and has nothing to resume; replay into another directory")
    run = from_yaml(directory.config)
    saved = checkpoint.numbered(directory.checkpoints)
    return _run(run, directory, restore_from=saved[-1] if saved else None, resumed=True)


def _run(run: Run, directory: RunDirectory, *, restore_from: tuple[int, Path] | None, resumed: bool) -> int:
    first_step = restore_from[0] if restore_from else 0
    with Progress(run) as progress:
        progress.say(f"run directory {directory.path}")
        recorder = Recorder(run, directory, progress, first_step=first_step)
        try:
            model_path = _model(run, directory, progress)
            run = starting_head.prepare(run, directory, model_path)
            with cluster(run.cluster, cpus=run.rollout.replicas + 1) as spawner:
                figures = asyncio.run(
                    _train(run, directory, recorder, spawner, model_path, restore_from, resumed=resumed)
                )
        except BaseException as error:
            cause = _first_cause(error)
            status = "interrupted" if isinstance(cause, KeyboardInterrupt) else "failed"
            summary.write(directory, recorder, status=status, error=f"{type(cause).__name__}: {cause}")
            if isinstance(cause, AsyncRLError):
                raise cause from None
            raise
        finally:
            recorder.close()
        progress.say(summary.sentence(figures))
    return 0


def _first_cause(error: BaseException) -> BaseException:
    """Task groups wrap what went wrong; a person wants the thing itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _model(run: Run, directory: RunDirectory, progress: Progress) -> Path:
    """The directory of the starting weights; a warm start is made once and kept with the run."""
    match run.model:
        case Checkpoint():
            return Path(run.model.path).expanduser().resolve()
        case WarmStart():
            from asyncrl.training.warm_start import make_model

            if not directory.model.exists():
                progress.say(f"warm start: {run.model.steps} supervised steps on noisy worked examples")
                make_model(run.model, run.task, run.seed, directory.model, progress.warm_start)
            return directory.model.resolve()


async def _train(
    run: Run,
    directory: RunDirectory,
    recorder: Recorder,
    spawner: Spawner,
    model_path: Path,
    restore_from: tuple[int, Path] | None,
    *,
    resumed: bool,
) -> dict[str, Any]:
    first_step = restore_from[0] if restore_from else 0
    fleet = await _place(run, directory, spawner, model_path, restore_step=first_step if resumed else None)
    recorder.event("fleet_started", first_step=first_step)
    try:
        if restore_from:
            await fleet.trainer.restore(restore_from[1])
        await AsyncGrpo(run, fleet, make_task(run.task, run.seed), recorder, first_step=first_step).run()
        return summary.write(
            directory,
            recorder,
            status="ok",
            ledger=await fleet.buffer.ledger(),
            waste=await fleet.buffer.waste(),
        )
    finally:
        await fleet.close()


async def _place(
    run: Run, directory: RunDirectory, spawner: Spawner, model_path: Path, *, restore_step: int | None
) -> Fleet:
    """Start every actor. Those that only hand things on take no core of their own."""
    buffer = await spawner.spawn("buffer", CONTROL, BufferActor, run, directory.trajectories.resolve(), restore_step)
    reward = await spawner.spawn("reward", CONTROL, RewardActor, run.reward)
    drafter = await _place_drafter(run, directory, spawner, model_path)
    async with asyncio.TaskGroup() as tasks:
        starting_trainer = tasks.create_task(
            spawner.spawn(
                "trainer",
                COMPUTE,
                TrainerActor,
                run,
                model_path,
                directory.checkpoints.resolve(),
                buffer,
                drafter,
                _busy_flag(directory) if drafter is not None else None,
            )
        )
        starting_rollouts = [
            tasks.create_task(spawner.spawn(name, COMPUTE, RolloutActor, run, model_path, name, buffer, reward))
            for name in (f"rollout-{index}" for index in range(run.rollout.replicas))
        ]
    trainer, rollouts = starting_trainer.result(), [task.result() for task in starting_rollouts]
    await asyncio.gather(reward.start(), *(rollout.start() for rollout in rollouts))
    timeout_s = run.flow.stall_timeout_s
    link = DrafterLink(drafter, rollouts, timeout_s=timeout_s) if drafter is not None else None
    publisher = Publisher(trainer, rollouts, link, timeout_s=timeout_s)
    return Fleet(buffer=buffer, reward=reward, rollouts=rollouts, trainer=trainer, publisher=publisher, drafter=link)


async def _place_drafter(run: Run, directory: RunDirectory, spawner: Spawner, model_path: Path) -> DrafterActor | None:
    if not isinstance(run.drafter, EagleDrafter | Eagle3Drafter) or not run.drafter.training.on:
        return None
    resources = IDLE if run.drafter.training.spot else COMPUTE
    drafter = await spawner.spawn(
        "drafter", resources, DrafterActor, run, model_path, directory.drafter.resolve(), _busy_flag(directory)
    )
    await drafter.start()
    return drafter


def _busy_flag(directory: RunDirectory) -> Path:
    return directory.drafter.resolve() / "trainer-busy"
