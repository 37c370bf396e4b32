"""Training checkpoints: weights in Hugging Face layout, optimizer, and what had been consumed, in one atomic directory.

`checkpoints/step-N/` is written beside its final name, synced, and renamed: it is either whole or absent. Everything
is safetensors or JSON, nothing is pickled. The consumed groups stand in the same manifest as the optimizer state, so
a resumed run trains on each group exactly once. Of several ranks each writes files of its own, and reads its part of
whatever files there are: a checkpoint can be continued with any number of ranks.
"""

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import save_model, weight_files
from asyncrl.training import adapter_files, sharded
from asyncrl.training.critic import Critic
from asyncrl.training.learner import Learner
from asyncrl.training.ranks import Ranks
from asyncrl.training.shards import TensorFiles, fill, read_rows

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
KEPT_BESIDE_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class TrainingManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the checkpoint stands for."""

    step: int
    """Optimizer steps taken; also the policy version of the weights."""
    samples_trained: int
    consumed: tuple[tuple[int, int], ...]
    """Group ids trained on, as inclusive ranges."""
    least_drift: float | None = None
    """What `Caution` has seen, put in by `save`; None: nothing yet, or an older checkpoint."""


def ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Sorted ids as inclusive ranges; a repeated id is an error, for it would have been trained on twice."""
    found: list[tuple[int, int]] = []
    for number in sorted(ids):
        if found and number == found[-1][1]:
            raise ValueError(f"group {number} was consumed twice")
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def save(learner: Learner, directory: Path, manifest: TrainingManifest, *, model_path: Path, keep: int) -> Path:
    """Write `step-N` under `directory` and delete all but the `keep` newest. Every rank has to come here."""
    ranks = learner.ranks
    final = directory / f"step-{manifest.step}"
    scratch = directory / f".step-{manifest.step}.partial"
    learner.settle()
    if ranks.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    ranks.fence()
    if ranks.world > 1:
        sharded.write(learner, scratch)
    else:
        _write(learner, scratch)
    if learner.lora.rank:
        adapter_files.save_adapters(learner, scratch, learner.lora, model_path)
    if ranks.rank == 0:
        seen = learner.caution.least
        manifest = msgspec.structs.replace(manifest, least_drift=seen if math.isfinite(seen) else None)
        _complete(scratch, final, manifest, model_path)
        _forget(directory, keep)
    ranks.fence()
    return final


def _write(learner: Learner, scratch: Path) -> None:
    save_model(learner.model, scratch, learner.tensors())
    save_file(_optimizer_tensors(learner.model, learner.optimizer), scratch / OPTIMIZER)
    if learner.critic is not None:
        critic = dict(learner.critic.named_parameters()) | _optimizer_tensors(learner.critic, learner.critic.optimizer)
        save_file(critic, scratch / CRITIC)


def _complete(scratch: Path, final: Path, manifest: TrainingManifest, model_path: Path) -> None:
    for name in KEPT_BESIDE_WEIGHTS:
        if (model_path / name).is_file():
            shutil.copyfile(model_path / name, scratch / name)
    (scratch / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in scratch.rglob("*"):
        _sync(path)
    _sync(scratch)
    if final.exists():  # a resumed run reached this step again
        shutil.rmtree(final)
    scratch.rename(final)
    _sync(final.parent)


def _forget(directory: Path, keep: int) -> None:
    for _, old in numbered(directory)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f".{old.name}.old")))  # renamed: half of one must not look whole
    for left in directory.glob(".step-*.old"):
        shutil.rmtree(left, ignore_errors=True)


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = [(int(path.name.removeprefix("step-")), path) for path in directory.glob("step-*") if path.is_dir()]
    return sorted(found)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By Hugging Face name, from as many files as there are."""
    files = TensorFiles(weight_files(checkpoint))
    return {name: files.tensor(name) for name in files.names}


def read_manifest(checkpoint: Path) -> TrainingManifest:
    path = checkpoint / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainingManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); remove {checkpoint} to resume from the one before"
        ) from None


def restore(learner: Learner, checkpoint: Path) -> TrainingManifest:
    """Put weights, optimizer and version back, bit for bit."""
    manifest = read_manifest(checkpoint)
    learner.settle()
    if learner.lora.rank:
        adapter_files.restore_adapters(learner, checkpoint)
    elif (checkpoint / adapter_files.FOLDER).exists():
        raise CheckpointError(f"{checkpoint} was written with trainer.lora.rank, which this run has not set")
    else:
        fill(learner.model, checkpoint, learner.ranks)
    learner.weights_changed()
    _restore_optimizer(learner.model, learner.optimizer, _files(checkpoint, OPTIMIZER), learner.ranks)
    if learner.critic is not None:
        _restore_critic(learner.critic, checkpoint, learner.ranks)
    learner.version = manifest.step
    learner.caution.least = math.inf if manifest.least_drift is None else manifest.least_drift
    return manifest


def _files(checkpoint: Path, name: str) -> TensorFiles:
    """Of one rank, or of as many as there were."""
    return TensorFiles(sorted(checkpoint.glob(f"{Path(name).stem}*.safetensors")))


def _restore_critic(critic: Critic, checkpoint: Path, ranks: Ranks) -> None:
    saved = _files(checkpoint, CRITIC)
    if not saved.names:
        raise CheckpointError(f"{checkpoint} holds no critic: it was not written with algorithm=ppo")
    for name, parameter in critic.named_parameters():
        read_rows(saved, name, parameter, ranks)
    _restore_optimizer(critic, critic.optimizer, saved, ranks)


def _restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, saved: TensorFiles, ranks: Ranks) -> None:
    for name, parameter in module.named_parameters():
        if f"{name}/step" in saved:
            step = saved.tensor(f"{name}/step").to(parameter.device)
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in sharded.MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}
            for key, moment in moments.items():
                read_rows(saved, f"{name}/{key}", moment, ranks)


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
