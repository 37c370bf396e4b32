"""Publications between real actors on a real Ray: one engine is killed in mid-sync, another one hangs."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from actors.buffer import BufferActor
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.runtime.spawn import Resources, Spawner, cluster
from actors.trainer.actor import TrainerActor
from asyncrl.config import Checkpoint, Run, WarmStart, Weights
from asyncrl.config.engine import NativeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.errors import WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.training.warm_start import make_model

NONE = Resources(cpus=0.0)
DEADLINE = 4.0


def _rollouts(mark: str) -> list[int]:
    """Processes of rollout actors that descend from this test, by a variable in their environment."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and f"ASYNCRL_TEST={mark}".encode() in (process / "environ").read_bytes()
                and (process / "cmdline").read_bytes().startswith(b"ray::RolloutActor")
            ):
                found.append(int(process.name))
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return found


async def _scenario(spawner: Spawner, model: Path, directory: Path) -> None:
    run = Run(
        model=Checkpoint(str(model)),
        engine=NativeEngine(max_length=128, device="cpu"),
        weights=Weights(deadline_s=DEADLINE),
    )
    buffer = await spawner.spawn("buffer", NONE, BufferActor, run, directory / "trajectories", None)
    reward = await spawner.spawn("reward", NONE, RewardActor, run.reward)
    trainer = await spawner.spawn("trainer", NONE, TrainerActor, run, model, directory / "checkpoints", buffer)
    names = ("rollout-0", "rollout-1")
    rollouts = {name: await spawner.spawn(name, NONE, RolloutActor, run, model, name, buffer, reward) for name in names}
    await asyncio.gather(*(rollout.start() for rollout in rollouts.values()))
    state = FleetState(rollouts)
    publisher = Publisher(trainer, state, deadline_s=DEADLINE, export_s=60, grace_s=1.0, required=1)
    assert (await publisher.publish()).attempts == 1
    mark = os.environ["ASYNCRL_TEST"]

    victim, other = _rollouts(mark)
    os.kill(victim, signal.SIGSTOP)  # so that it cannot be done before it is killed
    publishing = asyncio.create_task(publisher.publish())
    await asyncio.sleep(0.5)
    assert not publishing.done()
    os.kill(victim, signal.SIGKILL)
    assert (await publishing).attempts == 2, "the other one is given every byte again"
    assert len(state.participants) == 1

    os.kill(other, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"no answer from rollout-\d within 4 s; rollout-\d hung"):
        await publisher.publish()
    assert time.monotonic() - began < DEADLINE + 30
    assert state.participants == ()


@pytest.mark.timeout(240)
def test_an_engine_dies_and_an_engine_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    shape = WarmStart(hidden_size=32, heads=2, intermediate_size=64, steps=2, batch_tokens=64)
    model = make_model(shape, ChainsTask(), 0, tmp_path / "model")
    with cluster("local", cpus=1) as spawner:
        asyncio.run(_scenario(spawner, model, tmp_path))
    deadline = time.monotonic() + 60
    while left := _rollouts(str(tmp_path)):
        assert time.monotonic() < deadline, f"{left} outlive their cluster, though one of them is stopped"
        time.sleep(0.1)
