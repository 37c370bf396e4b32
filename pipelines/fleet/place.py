"""Places every actor of a run on its cluster."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.buffer import BufferActor
from actors.drafter.actor import DrafterActor
from actors.fleet import EngineFactory, Fleet
from actors.gateway.actor import GatewayActor
from actors.publisher import DrafterLink, Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.runtime.resources import Resources
from actors.runtime.spawn import Spawner
from actors.teacher import TeacherActor
from actors.trainer import group
from asyncrl.config import Run
from asyncrl.drafting.bandit import Range
from asyncrl.fleet.placement import Demand, Offer, demands
from asyncrl.fleet.state import FleetState
from asyncrl.models.config import read_config
from asyncrl.system.run_directory import RunDirectory
from pipelines.evaluate import suite_rewards
from pipelines.fleet.cluster_offer import expecting
from pipelines.supervision.watchdog import backstop

CONTROL = Resources(near="driver")
"""The buffer writes into the run's directory, which is on the driver's machine."""
STATELESS = Resources(near="driver", restarts=-1, repeatable=True)
TEACHER = Resources(near="driver_if_possible", restarts=-1, repeatable=True)
TRAINER = Resources(near="driver_if_possible")


async def place(
    run: Run,
    offer: Offer,
    directory: RunDirectory,
    spawner: Spawner,
    model_path: Path,
    *,
    restore_step: int | None,
    sizes: Sequence[int | None] = (),
) -> Fleet:
    """Start every actor. Those that only hand things on take no core of their own. `sizes`: of the sources of
    prompts."""
    wanted = demands(run, offer)
    trajectories = directory.trajectories.resolve()
    to_buffer = run, trajectories, restore_step, sizes
    buffer = await spawner.spawn("buffer", CONTROL.of(wanted["buffer"]), BufferActor, *to_buffer)
    judge = run.reward, run.environment, run.stages, directory.judge.resolve(), suite_rewards(run), buffer
    reward = await spawner.spawn("reward", STATELESS.of(wanted["reward"]), RewardActor, *judge)
    gateway = None
    if run.agent.on:
        at = Resources(near="driver").of(wanted["gateway"])
        gateway = await spawner.spawn("gateway", at, GatewayActor, run, model_path)
    drafter = await _place_drafter(run, wanted, directory, spawner, model_path)
    teachers = await _place_teachers(run, wanted, spawner, model_path)
    engine = Resources(restarts=run.recovery.max_restarts)
    if "rollout" in wanted:
        engine = engine.of(wanted["rollout"])

    taught = drafter if "rollout" in run.hidden_states_from else None

    async def place_engine(name: str) -> RolloutActor:
        learned = _learned(directory).get(name, [])
        to_engine = run, model_path, name, buffer, reward, taught, learned, gateway, teachers
        return await spawner.spawn(name, engine, RolloutActor, *to_engine)

    names = [f"rollout-{index}" for index in range(run.rollout.replicas)]
    async with asyncio.TaskGroup() as tasks:
        starting_trainer = tasks.create_task(
            group.start(
                spawner,
                TRAINER.of(wanted["trainer"]),
                run,
                model_path,
                directory.checkpoints.resolve(),
                buffer,
                drafter if "trainer" in run.hidden_states_from else None,
                _busy_flag(directory) if drafter is not None else None,
                timeout_s=backstop(run),
            )
        )
        factory = [tasks.create_task(place_engine(name)) for name in names]
    trainer, rollouts = starting_trainer.result(), [task.result() for task in factory]
    starting = [reward.start(), *([gateway.start()] if gateway is not None else [])]
    await asyncio.gather(*starting, *(rollout.start() for rollout in rollouts))
    state = FleetState(dict(zip(names, rollouts, strict=True)), run.recovery.max_restarts)
    timeout_s = backstop(run)
    link = DrafterLink(drafter, state, timeout_s=timeout_s) if drafter is not None else None
    publisher = Publisher(trainer, state, link, deadline_s=run.weights.deadline_s, export_s=timeout_s, required=1)
    return Fleet(
        buffer=buffer,
        reward=reward,
        state=state,
        trainer=trainer,
        publisher=publisher,
        factory=EngineFactory(place_engine=place_engine, end=spawner.end, expect=expecting(run, offer)),
        drafter=link,
        gateway=gateway,
        teachers=teachers,
    )


async def _place_teachers(
    run: Run, wanted: dict[str, Demand], spawner: Spawner, model_path: Path
) -> tuple[TeacherActor, ...]:
    """All of them load their models at the same time."""
    settings = [msgspec.structs.replace(each, path=str(each.directory.resolve())) for each in run.teachers]
    vocabulary = read_config(model_path, run.model.backend).vocabulary if run.distill.top_k else None
    starting = [
        spawner.spawn(f"teacher-{number}", TEACHER.of(wanted["teacher"]), TeacherActor, run, each, vocabulary)
        for number, each in enumerate(settings)
    ]
    return tuple(await asyncio.gather(*starting))


async def _place_drafter(
    run: Run, wanted: dict[str, Demand], directory: RunDirectory, spawner: Spawner, model_path: Path
) -> DrafterActor | None:
    head = run.drafter.head
    if head is None or not head.trains:
        return None
    resources = Resources(near="driver_if_possible", idle_priority=head.training.spot).of(wanted["drafter"])
    drafter = await spawner.spawn(
        "drafter", resources, DrafterActor, run, model_path, directory.drafter.resolve(), _busy_flag(directory)
    )
    await drafter.start()
    return drafter


def _learned(directory: RunDirectory) -> dict[str, list[Range]]:
    """What each engine knew about drafting when the run was last saved."""
    path = directory.speculation
    return msgspec.json.decode(path.read_bytes(), type=dict[str, list[Range]]) if path.exists() else {}


def _busy_flag(directory: RunDirectory) -> Path:
    return directory.drafter.resolve() / "trainer-busy"
