"""The files of a checkpoint that several ranks write, each about as many bytes.

Tensors are gathered one after the other and kept, whole, by the rank that writes them: the files look the same
whatever the number of ranks was, the weights are a sharded Hugging Face checkpoint, and any other number can go on.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import WEIGHTS, save_config
from asyncrl.models.names import cut, hf_parts
from asyncrl.training.learner import Learner
from asyncrl.training.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def write(learner: Learner, directory: Path) -> None:
    """This rank's files; CheckpointError, on every rank, if one cannot write its own."""
    ranks, problem = learner.ranks, ""
    for stem, tensors in _shard_files(learner):
        try:
            save_file(tensors, directory / _name(stem, ranks.rank, ranks.world), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            problem = f"rank {ranks.rank} cannot write into {directory}: {error}"
    if ranks.rank == 0:
        save_config(learner.model, directory, torch.float32)
        files = {name: _name("model", rank, ranks.world) for name, rank in _weight_owners(learner).items()}
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    if problems := [found.decode() for found in ranks.exchange(problem.encode()) if found]:
        raise CheckpointError(f"{problems[0]}; the disk must have room, and every machine of the trainer must see it")


def _name(stem: str, rank: int, world: int) -> str:
    return f"{stem}-{rank + 1:05}-of-{world:05}.safetensors"


def _shard_files(learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Gathered when asked for, so that one file's tensors are here at a time."""
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
    for name, parts in hf_parts(model):
        whole = learner.outgoing.weight(name, parts)
        if owners[name] == ranks.rank:
            found |= dict(cut(whole.cpu(), parts))
    return found


def _weight_owners(learner: Learner) -> dict[str, int]:
    owners = _owners(learner.model, learner.ranks.world)
    return {part.name: owners[own] for own, parts in hf_parts(learner.model) for part in parts}


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
    """Who writes which parameter: always the one with the fewest bytes so far."""
    used = [0] * world
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        found[name] = used.index(min(used))
        used[found[name]] += parameter.numel()
    return found
