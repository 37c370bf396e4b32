"""The drafter actor: what it reads of the policy, and what becomes of an error while it trains."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.drafter.actor import DrafterActor
from asyncrl.config import Checkpoint, Run
from asyncrl.config.drafter import DrafterTraining, EagleDrafter
from asyncrl.drafting.checkpoint import save_head
from asyncrl.drafting.idle_gate import BusyFlag
from asyncrl.drafting.windows import encode
from asyncrl.errors import DrafterError
from asyncrl.models.files import WEIGHTS
from tests.support.draft_windows import random_head, random_window
from tests.support.tiny_model import tiny_checkpoint


def policy(tmp_path: Path, *, tied: bool) -> Path:
    tiny_checkpoint(tmp_path / "policy", "qwen3", tie_word_embeddings=tied, head_dim=8)
    return tmp_path / "policy"


def drafter_for(policy: Path, training: DrafterTraining | None = None) -> DrafterActor:
    directory = policy.parent / "drafter"
    save_head(random_head("eagle"), directory)
    training = training or DrafterTraining(batch_tokens=8, spot=False)
    drafter = EagleDrafter(path=str(directory), training=training)
    run = Run(name="drafted", model=Checkpoint(path=str(policy)), drafter=drafter)
    return DrafterActor(run, policy, directory, policy.parent / "busy")


@pytest.mark.parametrize("tied", [True, False])
def test_of_the_policy_it_reads_two_matrices_and_nothing_else(tmp_path: Path, tied: bool) -> None:
    """What has lost its layers can be read so, and in no other way."""
    directory = policy(tmp_path, tied=tied)
    file = directory / WEIGHTS
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".layers." not in name}
    assert len(tensors) == (2 if tied else 3)
    save_file(tensors, file, metadata={"format": "pt"})
    drafter_for(directory)


def test_an_error_in_training_is_told_with_each_status(tmp_path: Path) -> None:
    """Hidden states that no head of this model can have."""

    async def play() -> None:
        drafter = drafter_for(policy(tmp_path, tied=True))
        await drafter.start()
        assert (await drafter.status()).updates == 0
        await drafter.collect(encode([random_window("eagle", 20, hidden_T_E=torch.zeros(20, 31))]))
        async with asyncio.timeout(60):
            await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "drafter"])
        for _ in range(2):
            with pytest.raises(DrafterError, match="it trains no more: RuntimeError"):
                await drafter.status()
        await drafter.close()

    asyncio.run(play())


def test_beside_a_trainer_that_never_waits_it_trains_in_its_share(tmp_path: Path) -> None:
    directory = policy(tmp_path, tied=True)

    async def play() -> None:
        drafter = drafter_for(directory, DrafterTraining(batch_tokens=8, share=0.5))
        with BusyFlag(directory.parent / "busy").set():
            await drafter.start()
            await drafter.collect(encode([random_window("eagle", 20)]))
            async with asyncio.timeout(60):
                while not (found := await drafter.status()).updates:  # noqa: ASYNC110  (nothing tells of an update)
                    await asyncio.sleep(0.01)
        assert found.seconds == found.seconds_beside > 0
        await drafter.close()

    asyncio.run(play())
