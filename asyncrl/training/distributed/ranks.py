"""What one rank of a trainer knows of the others, what they do together, and the rendezvous where they find each other.

Every rank gets the same groups and makes the same calls in the same order. Each computes by itself what the share of
every rank is, and works on its own; nothing is distributed, and only gradients, sums and weights travel. Every replica
of the trainer, of which there are `trainer.replicas`, has each weight once. With `trainer.context_parallel` groups of
ranks compute a batch together (asyncrl.training.distributed.context). `Ranks` is a trainer of one rank;
`asyncrl.training.distributed.fsdp` has the one of several.
"""

import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, distributed, nn

from asyncrl.config.run import Backend
from asyncrl.models.checkpoint import load_policy
from asyncrl.models.collectives import RankGroup
from asyncrl.models.expert_parallel import ExpertGroup
from asyncrl.models.policy import PolicyModel

TCPStore: Any = cast(Any, distributed).TCPStore  # documented, and not marked as exported


class Ranks:
    """One rank: everything is here, and there is nobody to wait for."""

    rank = 0
    world = 1
    contexts: Mapping[int, RankGroup | None] = MappingProxyType({1: None})
    """By their number, in order: those that may compute a batch together with it, or none for a batch of its own."""
    experts: ExpertGroup | None = None
    """Those that share the experts of every layer with it."""

    def load(
        self, path: Path, backend: Backend, device: torch.device, dtype: torch.dtype, *, output: bool = True
    ) -> PolicyModel:
        """A model, perhaps still without its weights: `shard` comes next. Without `output` it ends at the hidden
        states, and an output matrix that is not tied to the embeddings is left out."""
        return load_policy(path, backend, dtype, output=output).to(device)

    def shard(self, module: nn.Module, model: PolicyModel, path: Path, dtype: torch.dtype) -> None:
        """Keep only this rank's part of a module, to compute in `dtype`; `model`, in it, gets its weights."""

    def settle(self, module: nn.Module) -> None:
        """Before its weights are read or written: a forward without a backward has left some of them whole."""

    def combine(self, parameters: Iterable[nn.Parameter]) -> None:
        """Once a step: gradients that are means over a replica become means over all ranks. Every rank has to have
        those of the same parameters."""

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> float:
        """Shorten their gradient to this norm if it is longer; the norm that it had."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def mismatch(self) -> str:
        """What this rank was sent otherwise than it arrived, since the last call; nothing, as a rule."""
        return "" if self.experts is None else self.experts.mismatch()

    def exchange(self, message: bytes) -> list[bytes]:
        """Everybody's, by rank."""
        return [message]

    def fence(self) -> None:
        """Returns when every rank has come here."""

    def rows(self, tensor: Tensor) -> range:
        """Those of a weight that are here."""
        return range(tensor.shape[0])

    def mine(self, tensor: Tensor) -> Tensor:
        """These rows; writing into them writes the weight."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """All rows, on every rank."""
        return tensor

    def leave(self) -> None:
        """The end, for this process."""


class RankSeat(msgspec.Struct, frozen=True, kw_only=True):
    """The number of one rank among the others, and where it meets them."""

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float
    """Longest wait for the others."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def store(self) -> Any:
        return TCPStore(self.host, self.port, is_master=False, timeout=self.timeout)


class Rendezvous:
    """A store in the process that starts the ranks, at one address only. Ranks need it to their end."""

    def __init__(self, host: str, world: int, timeout_s: float) -> None:
        with socket.create_server((host, 0)) as listening:  # TCPStore's own would listen at every address
            port = listening.getsockname()[1]
            descriptor = listening.detach()
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        seat = partial(RankSeat, world=world, host=host, port=port, timeout_s=timeout_s)
        self.seats = [seat(rank=rank) for rank in range(world)]
