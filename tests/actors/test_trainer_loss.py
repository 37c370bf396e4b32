"""The trainer's held-out loss: of the weights as they are, and nothing is learned by it."""

import asyncio
from pathlib import Path

import pytest

from actors.buffer import BufferActor
from actors.trainer.actor import TrainerActor
from asyncrl.config import Checkpoint, Rollout, Run, Trainer, Weights
from asyncrl.config.algorithm import Supervised
from asyncrl.training.learner import Learner
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups


def test_the_loss_of_held_out_samples(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model")
    run = Run(
        name="loss",
        cluster="inprocess",
        algorithm=Supervised(),
        model=Checkpoint(str(tmp_path / "model")),
        rollout=Rollout(group_size=1),
        trainer=Trainer(device="cpu"),
        weights=Weights(transport="file"),
    )
    samples = [trajectory for group in make_groups(2) for trajectory in group.trajectories]

    async def scene() -> list[float]:
        buffer = BufferActor(run, tmp_path / "trajectories")
        trainer = TrainerActor(run, tmp_path / "model", tmp_path / "checkpoints", buffer)
        found = [await trainer.loss(samples) for _ in range(2)]
        await trainer.close()
        await buffer.close()
        return found

    learner = Learner(tmp_path / "model", run)
    learner.accumulate(make_groups(2))
    first, second = asyncio.run(scene())
    assert first == second
    assert first == pytest.approx(learner.step().loss, rel=1e-6)
