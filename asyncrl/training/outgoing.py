"""Weights on their way out of a learner: whole, whatever part is here, and with adapters merged into them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncrl.models import lora
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import Part, cut, hf_parts, hf_tensors
from asyncrl.training.ranks import Ranks
from asyncrl.training.shards import ShardSource


class Outgoing:
    """Every rank makes the same calls."""

    def __init__(self, model: Decoder, ranks: Ranks, *, adapted: bool) -> None:
        self._model, self._ranks, self._adapted = model, ranks, adapted

    def weight(self, own: str, parts: tuple[Part, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._adapted:
            return lora.merged(self._model, own, parts, self._ranks.whole).to(dtype)
        return self._ranks.whole(self._model.get_parameter(own).detach().to(dtype))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """In fp32, by Hugging Face name."""
        if self._ranks.world == 1 and not self._adapted:
            return hf_tensors(self._model)
        return (pair for own, parts in hf_parts(self._model) for pair in cut(self.weight(own, parts), parts))

    def source(self, dtype: torch.dtype) -> ShardSource:
        return ShardSource(self._model, hf_parts(self._model), self.weight, dtype, self._ranks)

    def adapters(self) -> ShardSource:
        """They alone, in fp32: for engines that have the rest."""
        return ShardSource(self._model, lora.adapter_parts(self._model), self._adapter, torch.float32, self._ranks)

    def _adapter(self, own: str, parts: tuple[Part, ...], dtype: torch.dtype) -> Tensor:
        return self._ranks.whole(lora.parameter(self._model, own))
