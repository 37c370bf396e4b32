"""Training checkpoints: weights in Hugging Face layout, optimizer, and what had been consumed, in one atomic directory.

`checkpoints/step-N/` is written beside its final name, synced, and renamed: it is either whole or absent. Everything
is safetensors or JSON, nothing is pickled. The consumed groups stand in the same manifest as the optimizer state, so
a resumed run trains on each group exactly once. `background_save` copies and writes while training goes on.

Of several ranks each writes files of its own, of about as many bytes, and reads its part of whatever files there are: a
checkpoint can be continued with any number of ranks. Tensors are gathered one after the other and kept, whole, by the
rank that writes them, so that the weights are a sharded Hugging Face checkpoint whatever the number of ranks was.
Adapters lie in a folder of their own in peft's format: beside the merged weights transformers would apply them again.

Not by torch.distributed.checkpoint, which pickles its metadata and whose files no Hugging Face tool reads.
"""

import json
import math
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.config.trainer import Lora
from asyncrl.errors import CheckpointError, StorageError
from asyncrl.models import lora
from asyncrl.models.checkpoint import save_config, save_model
from asyncrl.models.files import INDEX, weight_files
from asyncrl.models.names import cut
from asyncrl.models.policy import PolicyModel
from asyncrl.system.storage import storing, sync
from asyncrl.training.adamw import HALF, AdamW
from asyncrl.training.checkpoint_manifest import TrainingManifest, numbered, read_manifest, write_manifest
from asyncrl.training.critic import Critic
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.distributed.shards import TensorFiles, read_parts, read_rows
from asyncrl.training.host_copies import on_host
from asyncrl.training.learner import Learner
from asyncrl.training.memory import FLOAT

OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
ADAPTERS = "adapter"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT_BESIDE_WEIGHTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class Snapshot(NamedTuple):
    """What one rank saves: copies, or the learner's own tensors while it waits."""

    model: PolicyModel
    """For its config only."""
    manifest: TrainingManifest
    weights: Iterable[tuple[str, Tensor]]
    optimizer: dict[str, Tensor]
    critic: dict[str, Tensor]
    adapters: dict[str, Tensor]
    lora: Lora

    def write(self, directory: Path, model_path: Path, keep: int) -> Path:
        """Write `step-N` under `directory` and delete all but the `keep` newest."""
        scratch = _scratch(directory, self.manifest.step)
        with storing(scratch):
            _begin(scratch)
            save_model(self.model, scratch, self.weights)
            save_file(self.optimizer, scratch / OPTIMIZER)
            if self.critic:
                save_file(self.critic, scratch / CRITIC)
            if self.adapters:
                _write_adapters(self.adapters, scratch, self.lora, model_path)
            return _complete(scratch, self.manifest, model_path, keep)


def save(learner: Learner, directory: Path, manifest: TrainingManifest, *, model_path: Path, keep: int) -> Path:
    """Write `step-N` under `directory` and delete all but the `keep` newest. Every rank has to call it."""
    manifest = filled(manifest, learner)
    if learner.ranks.world == 1:
        return snapshot(learner, manifest, copy=False).write(directory, model_path, keep)
    return _save_ranks(learner, directory, manifest, model_path, keep)


def snapshot(learner: Learner, manifest: TrainingManifest, *, copy: bool) -> Snapshot:
    """Of a learner of one rank. Without `copy` it has to be written before the next update, and with it an update has
    to wait until this returns; forwards and backwards change nothing that is copied."""
    learner.settle()
    critic: dict[str, Tensor] = {}
    if (own := learner.critic) is not None:
        critic = dict(own.named_parameters()) | _optimizer_tensors(own, own.optimizer)
    optimizer = _optimizer_tensors(learner.model, learner.optimizer)
    return Snapshot(
        model=learner.model,
        manifest=manifest,
        weights=list(learner.copies()) if copy else learner.tensors(),
        optimizer=_copies(optimizer) if copy else optimizer,
        critic=_copies(critic) if copy else critic,
        adapters=_adapters(learner),  # few, and gathered into tensors of their own
        lora=learner.lora,
    )


def filled(manifest: TrainingManifest, learner: Learner) -> TrainingManifest:
    """With what the learner has seen up to its last update."""
    seen = learner.caution.least
    seen = seen if math.isfinite(seen) else None
    return msgspec.structs.replace(manifest, least_drift=seen, momentum_ages=learner.momentum.ages)


def snapshot_bytes(learner: Learner) -> int:
    """Of host memory that a copy takes."""
    modules: list[tuple[nn.Module, torch.optim.Optimizer]] = [(learner.model, learner.optimizer)]
    if learner.critic is not None:
        modules.append((learner.critic, learner.critic.optimizer))
    weights = sum(FLOAT * parameter.numel() for module, _ in modules for parameter in module.parameters())
    moments = (tensor for pair in modules for tensor in _optimizer_tensors(*pair).values())
    return weights + sum(tensor.nbytes for tensor in moments)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: on_host(tensor) for name, tensor in tensors.items()}


def _save_ranks(learner: Learner, directory: Path, manifest: TrainingManifest, model_path: Path, keep: int) -> Path:
    """All ranks together; they wait for each other, so nothing is trained meanwhile."""
    ranks, scratch = learner.ranks, _scratch(directory, manifest.step)
    learner.settle()
    with _agreed(ranks, scratch):
        if ranks.rank == 0:
            _begin(scratch)
    _write_shards(learner, scratch)
    adapters = _adapters(learner)
    with _agreed(ranks, scratch):
        if ranks.rank == 0:
            if adapters:
                _write_adapters(adapters, scratch, learner.lora, model_path)
            _complete(scratch, manifest, model_path, keep)
    return directory / f"step-{manifest.step}"


def _scratch(directory: Path, step: int) -> Path:
    return directory / f".step-{step}.partial"


def _begin(scratch: Path) -> None:
    for left in scratch.parent.glob(".step-*.partial"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    scratch.mkdir(parents=True)


def _write_shards(learner: Learner, directory: Path) -> None:
    """This rank's files."""
    ranks = learner.ranks
    for stem, tensors in _shard_files(learner):
        path = directory / _name(stem, ranks.rank, ranks.world)
        with _agreed(ranks, path):
            save_file(tensors, path, metadata={"format": "pt"})
    with _agreed(ranks, directory):
        if ranks.rank == 0:
            save_config(learner.model, directory, torch.float32)
            files = {name: _name("model", rank, ranks.world) for name, rank in _weight_owners(learner).items()}
            (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))


@contextmanager
def _agreed(ranks: Ranks, path: Path) -> Generator[None, None, None]:
    """Ends when every rank has come here; StorageError, on every rank, if one could not write what is inside."""
    problem = b""
    try:
        with storing(path):
            yield
    except StorageError as error:
        problem = msgspec.json.encode((ranks.rank, error.errno, error.strerror))
    if problems := [found for found in ranks.exchange(problem) if found]:
        rank, number, reason = msgspec.json.decode(problems[0], type=tuple[int, int, str])
        raise StorageError(
            number, f"rank {rank} cannot write: {reason}; every machine of the trainer must see it", str(path)
        )


def _name(stem: str, rank: int, world: int) -> str:
    return f"{stem}-{rank + 1:05}-of-{world:05}.safetensors"


def _shard_files(learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Gathered lazily, so that one file's tensors are in memory at a time."""
    ranks, model = learner.ranks, learner.model
    yield "model", _weights(learner)
    yield "optimizer", _moments(model, learner.optimizer, ranks)
    if (critic := learner.critic) is not None:
        owners = _owners(critic, ranks.world)
        own = {name: _kept(p, ranks, owners[name]) for name, p in critic.named_parameters()}
        weights = {name: tensor for name, tensor in own.items() if tensor is not None}
        yield "critic", weights | _moments(critic, critic.optimizer, ranks)


def _weights(learner: Learner) -> dict[str, Tensor]:
    model, ranks = learner.model, learner.ranks
    owners, found = _owners(model, ranks.world), dict[str, Tensor]()
    for name, parts in model.parts():
        whole = learner.outgoing.weight(name, parts)
        if owners.get(name, 0) == ranks.rank:
            found |= dict(cut(whole.cpu(), parts))
    return found


def _weight_owners(learner: Learner) -> dict[str, int]:
    owners = _owners(learner.model, learner.ranks.world)
    return {part.name: owners.get(own, 0) for own, parts in learner.model.parts() for part in parts}


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    owners, found = _owners(module, ranks.world), dict[str, Tensor]()
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in MOMENTS if state else ():
            whole = _kept(state[key], ranks, owners[name])
            if whole is not None:
                found |= {f"{name}/{key}": whole, f"{name}/step": state["step"]}
    return found


def _kept(tensor: Tensor, ranks: Ranks, owner: int) -> Tensor | None:
    """The whole tensor where it is written; every rank takes part."""
    whole = ranks.whole(tensor.detach())
    return whole.cpu() if owner == ranks.rank else None


def _owners(module: nn.Module, world: int) -> dict[str, int]:
    """Who writes which parameter: always the one with the fewest bytes so far. Buffers are the first rank's."""
    used = [0] * world
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        found[name] = used.index(min(used))
        used[found[name]] += parameter.numel()
    return found


def _adapters(learner: Learner) -> dict[str, Tensor]:
    """In peft's names, none without LoRA; every rank has to call it."""
    found: dict[str, Tensor] = {}
    for own, parts in lora.adapter_parts(learner.model) if learner.lora.rank else ():
        whole = learner.ranks.whole(learner.model.get_parameter(own).detach()).to("cpu", copy=True)
        found |= {lora.PEFT_PREFIX + name: tensor.contiguous() for name, tensor in cut(whole, parts)}
    return found


def _write_adapters(tensors: dict[str, Tensor], directory: Path, settings: Lora, base: Path) -> None:
    folder = directory / ADAPTERS
    folder.mkdir()
    save_file(tensors, folder / lora.WEIGHTS, metadata={"format": "pt"})
    (folder / lora.CONFIG).write_text(lora.peft_config(settings, base))


def _complete(scratch: Path, manifest: TrainingManifest, model_path: Path, keep: int) -> Path:
    for name in KEPT_BESIDE_WEIGHTS:
        if (model_path / name).is_file():
            shutil.copyfile(model_path / name, scratch / name)
    write_manifest(manifest, scratch)
    final = scratch.with_name(f"step-{manifest.step}")
    if final.exists():  # a resumed run reached this step again
        _set_aside(final)
    scratch.rename(final)
    sync(final.parent)
    for _, old in numbered(final.parent)[:-keep]:
        _set_aside(old)
    for left in final.parent.glob(".step-*.old"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def _set_aside(checkpoint: Path) -> None:
    """To be deleted; under another name, because half of one must not look whole."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By Hugging Face name, from as many files as there are."""
    files = TensorFiles(weight_files(checkpoint))
    return {name: files.tensor(name) for name in files.names}


def restore(learner: Learner, checkpoint: Path) -> TrainingManifest:
    """Put weights, optimizer and version back, bit for bit."""
    manifest = read_manifest(checkpoint)
    learner.settle()
    if learner.lora.rank:
        _restore_adapters(learner, checkpoint)
    elif (checkpoint / ADAPTERS).exists():
        raise CheckpointError(f"{checkpoint} was written with trainer.lora.rank, which this run has not set")
    else:
        learner.fill(checkpoint)
    _restore_optimizer(learner.model, learner.optimizer, _files(checkpoint, OPTIMIZER), learner.ranks)
    if learner.critic is not None:
        _restore_critic(learner.critic, checkpoint, learner.ranks)
    learner.version = manifest.step
    learner.caution.least = math.inf if manifest.least_drift is None else manifest.least_drift
    learner.momentum.ages = manifest.momentum_ages
    return manifest


def _restore_adapters(learner: Learner, checkpoint: Path) -> None:
    path = checkpoint / ADAPTERS / lora.WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} holds no adapters: it was not written with trainer.lora.rank")
    files = TensorFiles([path])
    for own, parts in lora.adapter_parts(learner.model):
        saved = tuple(part._replace(name=lora.PEFT_PREFIX + part.name) for part in parts)
        if missing := [part.name for part in saved if part.name not in files]:
            raise CheckpointError(f"{path} holds no {missing[0]}: it was written with other trainer.lora.targets")
        read_parts(files, saved, learner.model.get_parameter(own), learner.ranks)


def _files(checkpoint: Path, name: str) -> TensorFiles:
    """Of one rank, or of as many as there were."""
    return TensorFiles(sorted(checkpoint.glob(f"{Path(name).stem}*.safetensors")))


def _restore_critic(critic: Critic, checkpoint: Path, ranks: Ranks) -> None:
    saved = _files(checkpoint, CRITIC)
    if not saved.names:
        raise CheckpointError(f"{checkpoint} holds no critic: it was not written with algorithm=ppo")
    for name, parameter in critic.named_parameters():  # older checkpoints have an output matrix as well
        read_rows(saved, name, parameter, ranks)
    _restore_optimizer(critic, critic.optimizer, saved, ranks)


def _restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, saved: TensorFiles, ranks: Ranks) -> None:
    for name, parameter in module.named_parameters():
        if f"{name}/step" not in saved:
            continue
        if isinstance(optimizer, AdamW):
            moments = {key: _shaped(moment, parameter) for key, moment in optimizer.make_moments(parameter).items()}
            optimizer.state[parameter]["step"].copy_(saved.tensor(f"{name}/step"))
        else:
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS}
            optimizer.state[parameter] = {"step": saved.tensor(f"{name}/step").to(parameter.device), **moments}
        for key, moment in moments.items():
            if f"{name}/{key}" not in saved:
                raise CheckpointError(
                    f"the optimizer of the checkpoint has no {key} for {name}: it was written with another "
                    "trainer.optimizer; set that of the run that wrote it"
                )
            read_rows(saved, f"{name}/{key}", moment, ranks)


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": _shaped(value, parameter)
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if key != HALF  # is in the weights
    }


def _shaped(moment: Tensor, parameter: nn.Parameter) -> Tensor:
    """As torch's AdamW keeps it; what is kept in 8 bits stays flat."""
    return (
        moment.view(parameter.shape)
        if moment.shape[:1] == (parameter.numel(),) and moment.is_floating_point()
        else moment
    )
