"""Training checkpoints: weights in Hugging Face layout, optimizer, and what had been consumed, in one atomic directory.

`checkpoints/step-N/` is written beside its final name, synced, and renamed: it is either whole or absent. Everything
is safetensors or JSON, nothing is pickled. The consumed groups stand in the same manifest as the optimizer state, so
a resumed run trains on each group exactly once.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import WEIGHTS, save_model
from asyncrl.models.names import hf_tensors
from asyncrl.training.critic import Critic
from asyncrl.training.learner import Learner

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
    """Write `step-N` under `directory` and delete all but the `keep` newest."""
    final = directory / f"step-{manifest.step}"
    scratch = directory / f".step-{manifest.step}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_model(learner.model, scratch)
    for name in KEPT_BESIDE_WEIGHTS:
        if (model_path / name).is_file():
            shutil.copyfile(model_path / name, scratch / name)
    save_file(_optimizer_tensors(learner.model, learner.optimizer), scratch / OPTIMIZER)
    if learner.critic is not None:
        critic = dict(learner.critic.named_parameters()) | _optimizer_tensors(learner.critic, learner.critic.optimizer)
        save_file(critic, scratch / CRITIC)
    (scratch / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for path in scratch.iterdir():
        _sync(path)
    _sync(scratch)
    if final.exists():  # a resumed run reached this step again
        shutil.rmtree(final)
    scratch.rename(final)
    _sync(directory)
    for _, old in numbered(directory)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f".{old.name}.old")))  # renamed: half of one must not look whole
    for left in directory.glob(".step-*.old"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = [(int(path.name.removeprefix("step-")), path) for path in directory.glob("step-*") if path.is_dir()]
    return sorted(found)


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
    saved = load_file(checkpoint / WEIGHTS)
    with torch.no_grad():
        for name, tensor in hf_tensors(learner.model):
            tensor.copy_(saved[name])
    learner.weights_changed()
    _restore_optimizer(learner.model, learner.optimizer, load_file(checkpoint / OPTIMIZER))
    if learner.critic is not None:
        _restore_critic(learner.critic, checkpoint)
    learner.version = manifest.step
    return manifest


def _restore_critic(critic: Critic, checkpoint: Path) -> None:
    if not (checkpoint / CRITIC).is_file():
        raise CheckpointError(f"{checkpoint} holds no critic: it was not written with algorithm=ppo")
    saved = load_file(checkpoint / CRITIC)
    with torch.no_grad():
        for name, parameter in critic.named_parameters():
            parameter.copy_(saved[name])
    _restore_optimizer(critic, critic.optimizer, saved)


def _restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if f"{name}/step" in state:
            optimizer.state[parameter] = {
                key: state[f"{name}/{key}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
            }


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
