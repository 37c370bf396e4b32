"""What one rank of a trainer knows of the others, and what they do together.

Every rank is given the same groups and makes the same calls in the same order. Each finds by itself what the share of
every rank is and computes its own; nothing is handed out, and only gradients, sums and weights travel.
`Ranks` is a trainer that is alone; `asyncrl.training.fsdp` has the one with others.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from asyncrl.models.checkpoint import load_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder


class Ranks:
    """Everything is here, and there is nobody to wait for."""

    rank = 0
    world = 1

    def load(self, path: Path, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, ModelConfig]:
        """A model, perhaps still without its weights: `shard` comes next."""
        model, config = load_model(path, dtype=dtype)
        return model.to(device), config

    def shard(self, module: nn.Module, decoder: Decoder, path: Path, dtype: torch.dtype) -> None:
        """Keep only this rank's part of a module, to compute in `dtype`; `decoder`, in it, gets its weights."""

    def settle(self, module: nn.Module) -> None:
        """Before its weights are read or written: a forward without a backward has left some of them whole."""

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
