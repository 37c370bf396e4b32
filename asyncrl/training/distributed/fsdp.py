"""Ranks that each hold a part of every weight (FSDP2), over gloo on CPUs and NCCL on GPUs.

A layer's weights are whole only while it computes. Gradients come back as means over the ranks, each rank's own rows.
With `trainer.replicas` this is true of each replica: it has every weight once, and what all ranks average is one
gradient a step, in `combine`. `fully_shard` on a mesh of two dimensions would average over replicas in every backward,
and a step has many: it would send as many times the bytes over the slower network.

Between the ranks go numbers and JSON, never pickles; every wait among them has the deadline of the process group.
"""

import os
import sys
from collections.abc import Iterable
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config.run import Backend
from asyncrl.config.trainer import Trainer
from asyncrl.models.checkpoint import empty_policy
from asyncrl.models.collectives import RankGroup
from asyncrl.models.decoder import ExpertMixture
from asyncrl.models.expert_parallel import ExpertGroup
from asyncrl.models.policy import PolicyModel
from asyncrl.training.distributed.ranks import Ranks, RankSeat
from asyncrl.training.distributed.shards import fill


class FsdpRanks(Ranks):
    def __init__(self, seat: RankSeat, device: torch.device, settings: Trainer) -> None:
        """Returns when every rank is here. The ranks that share weights, experts or batches are neighbours."""
        self.rank, self.world, self._device = seat.rank, seat.world, device
        experts, self._replicas = settings.expert_parallel, settings.replicas
        self._shards = seat.world // self._replicas
        self._reduced_in = torch.bfloat16 if settings.reduce_dtype == "bf16" else torch.float32
        if ip_address(seat.host).is_loopback:  # all on this machine: nothing listens beyond it
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=seat.store(),
            rank=seat.rank,
            world_size=seat.world,
            timeout=seat.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        replica: Any = distributed.group.WORLD
        self._peers = None
        if self._replicas > 1:
            replica = _neighbours(seat, self._shards)
            self._peers = _same_places(seat, self._shards, seat.world)
        self._mesh = DeviceMesh.from_group(replica, device.type)
        degrees = settings.context_degrees
        self.contexts = {degree: RankGroup(_neighbours(seat, degree)) if degree > 1 else None for degree in degrees}
        if experts > 1:
            group, copies = _neighbours(seat, experts), _same_places(seat, experts, self._shards)
            self.experts = ExpertGroup(RankGroup(group), RankGroup(copies), self._shards, self._reduced_in)

    def load(
        self, path: Path, backend: Backend, device: torch.device, dtype: torch.dtype, *, output: bool = True
    ) -> PolicyModel:
        """Memory that nothing is written to takes no room: `shard` reads the rows of this rank only."""
        return empty_policy(path, backend, torch.float32, output=output)

    def shard(self, module: nn.Module, model: PolicyModel, path: Path, dtype: torch.dtype) -> None:
        narrow = dtype == torch.bfloat16  # the residual stream between the layers stays in fp32
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if narrow else None, reduce_dtype=self._reduced_in, cast_forward_inputs=not narrow
        )
        for layer in model.blocks():
            fully_shard(layer, mesh=self._mesh, mp_policy=policy, ignored_params=self._share_experts(layer))
        # What is not in a layer stays whole from forward to backward: the output matrix is used between the two.
        fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=False)
        model.place(self._device)
        fill(model, path, self)

    def _share_experts(self, layer: nn.Module) -> set[nn.Parameter]:
        """Matrices of experts, where ranks share them: each keeps those of as many, and FSDP leaves them alone."""
        shared: set[nn.Parameter] = set()
        for mixture in (each for each in layer.modules() if isinstance(each, ExpertMixture) and self.experts):
            mixture.group = self.experts
            for name in ("gate_up", "down"):
                whole = cast(nn.Parameter, getattr(mixture, name))
                own = whole.new_empty(len(whole) // self._shards, *whole.shape[1:], device=self._device)
                sharded = DTensor.from_local(own, self._mesh, [Shard(0)], run_check=False)
                setattr(mixture, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
                shared.add(getattr(mixture, name))
        return shared

    def settle(self, module: nn.Module) -> None:
        cast(FSDPModule, module).reshard()

    def combine(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._peers is None:
            return
        for gradient in (self.mine(p.grad) for p in parameters if p.grad is not None):
            sent = gradient.to(self._reduced_in)
            distributed.all_reduce(sent, group=self._peers)
            gradient.copy_(sent).div_(self._replicas)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> float:
        """Each replica finds the norm by itself, and a sum in another order would have them part by a bit a step."""
        trained = list(parameters)
        norm = self.whole(get_total_norm([p.grad for p in trained if p.grad is not None]))
        if self._peers is not None:
            distributed.broadcast(norm, group=self._peers, group_src=0)
        clip_grads_with_norm_(trained, limit, norm)
        return float(norm)

    def exchange(self, message: bytes) -> list[bytes]:
        mine = torch.from_numpy(np.frombuffer(message + b"\0", np.uint8).copy()).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        distributed.all_gather(sizes, torch.tensor([len(mine)], device=self._device))
        longest = max(int(size) for size in sizes)
        found = [torch.empty(longest, dtype=torch.uint8, device=self._device) for _ in range(self.world)]
        distributed.all_gather(found, functional.pad(mine, (0, longest - len(mine))))
        return [part[: int(size) - 1].cpu().numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def fence(self) -> None:
        self.exchange(b"")

    def rows(self, tensor: Tensor) -> range:
        if not isinstance(tensor, DTensor):  # a buffer, which every rank has whole
            return range(tensor.shape[0])
        size, place = ceil(tensor.shape[0] / self._shards), self.rank % self._shards
        return range(min(place * size, tensor.shape[0]), min((place + 1) * size, tensor.shape[0]))

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def leave(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _neighbours(seat: RankSeat, size: int) -> Any:
    """This rank's group, where as many neighbours are one."""
    return distributed.new_subgroups(group_size=size, timeout=seat.timeout)[0]


def _same_places(seat: RankSeat, size: int, within: int) -> Any:
    """The ranks with this one's place in groups of `size` neighbours, among `within` of them."""
    begins = range(0, seat.world, within)
    groups = [list(range(begin + place, begin + within, size)) for begin in begins for place in range(size)]
    return distributed.new_subgroups_by_enumeration(groups, timeout=seat.timeout)[0]
