"""Checkpoints: every byte is checksummed, they are written beside training, and a full disk is one clear error."""

import asyncio
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import Run, Trainer
from asyncrl.config.trainer import Lora
from asyncrl.errors import StorageError
from asyncrl.training import background_save, checkpoint
from asyncrl.training.background_save import BackgroundSave
from asyncrl.training.checkpoint_manifest import (
    MANIFEST,
    TrainingManifest,
    choose,
    damage,
    numbered,
    read_manifest,
    set_damaged_aside,
)
from asyncrl.training.learner import Learner
from tests.support.full_disk import file_size_limit
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

OLD_RUN = Path(__file__).parents[1] / "fixtures" / "old_runs" / "finished"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory, "qwen3")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def saved(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints."""
    directory = tmp_path_factory.mktemp("checkpoints")
    learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3)))
    for step in (1, 2):
        train(learner)
        checkpoint.save(learner, directory, manifest(step), model_path=model_path, keep=2)
    return directory


def manifest(step: int) -> TrainingManifest:
    return TrainingManifest(step=step, samples_trained=4 * step, consumed=((0, step - 1),))


def train(learner: Learner) -> None:
    learner.accumulate(make_groups(1))
    learner.step()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.tensors()}


def is_restored(path: Path, model_path: Path, expected: dict[str, torch.Tensor]) -> bool:
    learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3)))
    checkpoint.restore(learner, path)
    return all(torch.equal(tensor, expected[name]) for name, tensor in learner.tensors())


# -- damage ------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_of_any_file_is_named_and_the_checkpoint_before_is_used(saved: Path) -> None:
    files = sorted(path for path in (saved / "step-2").rglob("*") if path.is_file())
    assert {MANIFEST, "model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"} <= {
        path.name for path in files
    }
    for path in files:
        good = path.read_bytes()
        for offset in {0, len(good) // 2, len(good) - 1}:
            path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
            found = choose(saved)
            assert found.newest == (1, saved / "step-1"), (path, offset)
            (sentence,) = found.sentences
            assert path.name in sentence
            assert sentence.endswith("step-1 is used")
        path.write_bytes(good)
    assert choose(saved) == ((2, saved / "step-2"), [])


def test_every_byte_of_the_manifest_counts(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved / "step-2", tmp_path / "step-2")
    good = (copy / MANIFEST).read_bytes()
    with (copy / MANIFEST).open("r+b", buffering=0) as file:
        for offset, byte in enumerate(good):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << offset % 8]), offset)
            assert damage(copy).startswith(f"{MANIFEST} "), offset
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert damage(copy) == ""


def test_a_file_that_is_cut_or_missing_is_named(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved / "step-2", tmp_path / "step-2")
    size = (copy / checkpoint.OPTIMIZER).stat().st_size
    with (copy / checkpoint.OPTIMIZER).open("r+b") as file:
        file.truncate(size - 1)
    assert damage(copy) == f"optimizer.safetensors has {size - 1} bytes and not {size}"
    (copy / checkpoint.OPTIMIZER).unlink()
    assert damage(copy) == "optimizer.safetensors is missing"


def test_damaged_checkpoints_are_set_aside(saved: Path, tmp_path: Path) -> None:
    copies = shutil.copytree(saved, tmp_path / "checkpoints")
    (copies / "step-2" / MANIFEST).write_text("{")
    (said,) = set_damaged_aside(copies)
    assert said.startswith("checkpoint step-2 is damaged: manifest.json cannot be read (")
    assert [step for step, _ in numbered(copies)] == [1]
    assert (copies / "damaged-step-2").is_dir()
    assert set_damaged_aside(copies) == []


def test_checkpoints_without_checksums_are_used_as_before() -> None:
    found = choose(OLD_RUN / "checkpoints")
    assert found == ((6, OLD_RUN / "checkpoints" / "step-6"), [])
    assert not read_manifest(OLD_RUN / "checkpoints" / "step-6").files


# -- beside training ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_written_later_is_the_state_of_the_copy(model_path: Path, tmp_path: Path, dtype: str) -> None:
    learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3, dtype=dtype)))  # pyright: ignore[reportArgumentType]
    train(learner)
    expected = weights(learner)
    copied = checkpoint.snapshot(learner, manifest(1), copy=True)
    copies = [*(tensor for _, tensor in copied.weights), *copied.optimizer.values()]
    assert sum(tensor.nbytes for tensor in copies) == checkpoint.snapshot_bytes(learner)
    train(learner)
    path = copied.write(tmp_path, model_path, keep=1)
    assert damage(path) == ""
    again = Learner(model_path, Run(trainer=Trainer(lr=1e-3, dtype=dtype)))  # pyright: ignore[reportArgumentType]
    checkpoint.restore(again, path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.tensors())
    train(again)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.tensors(), learner.tensors(), strict=True))


@pytest.mark.parametrize("memory", [1 << 40, 0])
def test_the_next_checkpoint_and_the_end_wait_for_the_one_before(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """With room for a copy, and without: then `save` returns when all is written."""
    monkeypatch.setattr(background_save, "available_memory", lambda: memory)
    learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3)))

    async def scenario() -> None:
        saving = BackgroundSave(tmp_path, model_path=model_path, keep=2)
        for step in (1, 2, 3):
            train(learner)
            path = await saving.save(learner, manifest(step))
            assert (not memory) <= path.is_dir()
            await saving.copied()
            if step > 1:
                assert (tmp_path / f"step-{step - 1}").is_dir()
        await saving.written()
        assert damage(path) == ""
        saving.close()

    asyncio.run(scenario())
    assert [step for step, _ in numbered(tmp_path)] == [2, 3]
    assert is_restored(tmp_path / "step-3", model_path, weights(learner))


@pytest.mark.parametrize("lora", [0, 2])
def test_forward_and_backward_go_on_beside_the_copy_and_the_update_after_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: int
) -> None:
    run = Run(trainer=Trainer(lr=1e-3, lora=Lora(rank=lora)))
    learner, may_copy, now = Learner(model_path, run), threading.Event(), checkpoint.snapshot

    def later(*arguments: Any, **more: Any) -> checkpoint.Snapshot:
        assert may_copy.wait(60)
        return now(*arguments, **more)

    monkeypatch.setattr(checkpoint, "snapshot", later)

    async def scenario() -> dict[str, torch.Tensor]:
        saving = BackgroundSave(tmp_path, model_path=model_path, keep=2)
        train(learner)
        expected = weights(learner)
        await saving.save(learner, manifest(1))
        learner.accumulate(make_groups(1))
        assert saving.copying
        may_copy.set()
        await saving.copied()
        learner.step()
        await saving.written()
        saving.close()
        return expected

    expected = asyncio.run(scenario())
    again = Learner(model_path, run)
    checkpoint.restore(again, tmp_path / "step-1")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.tensors())
    train(again)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.tensors(), learner.tensors(), strict=True))


# -- a full disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 5_000, 100_000])
def test_a_full_disk_is_a_storage_error_and_the_one_before_stays(
    saved: Path, model_path: Path, tmp_path: Path, room: int
) -> None:
    copies = shutil.copytree(saved, tmp_path / "checkpoints")
    learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3)))
    train(learner)

    async def scenario() -> None:
        saving = BackgroundSave(copies, model_path=model_path, keep=2)
        with file_size_limit(room):
            await saving.save(learner, manifest(3))
            with pytest.raises(StorageError, match=r"File too large; make room and try again \(asyncrl resume\)"):
                await saving.written()
        saving.close()
        assert [step for step, _ in numbered(copies)] == [1, 2]
        again = BackgroundSave(copies, model_path=model_path, keep=2)
        await again.save(learner, manifest(3))
        await again.written()

    asyncio.run(scenario())
    assert [path.name for path in sorted(copies.iterdir())] == ["step-2", "step-3"]
    assert damage(copies / "step-3") == ""


@pytest.mark.parametrize("name", [MANIFEST, "optimizer.safetensors"])
def test_a_file_that_the_disk_does_not_give_is_no_damage(saved: Path, tmp_path: Path, name: str) -> None:
    """A stale handle, or permissions: the checkpoint may be sound, so it keeps its name."""
    copies = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    path = copies / "step-2" / name
    path.unlink()
    if name == MANIFEST:
        os.mknod(path, stat.S_IFSOCK | 0o600)  # to open it is an error for root, too
    else:
        path.symlink_to("x" * 300)  # nor can be found out what this is: the name is too long
    for ask in (set_damaged_aside, choose):
        with pytest.raises(StorageError, match="the file may be sound: mend the disk, its mount or the permissions"):
            ask(copies)
    assert sorted(path.name for path in copies.iterdir()) == ["step-1", "step-2"]
    if name == MANIFEST:
        with pytest.raises(StorageError, match="the file may be sound"):
            read_manifest(copies / "step-2")
