"""Weights as they leave a learner: whole tensors with merged adapters, and the probe of a version."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.config import Trainer
from asyncrl.models import lora
from asyncrl.models.names import Part, cut, hf_tensors
from asyncrl.models.policy import PolicyModel
from asyncrl.training.adapter_source import AdapterSource
from asyncrl.training.batches import NEXT, Block, pack
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.distributed.shards import ShardSource
from asyncrl.training.forward import all_logits, predicting_states
from asyncrl.training.host_copies import on_host


class Export:
    """Whole weights with merged adapters, whatever part this rank holds. Every rank makes the same calls."""

    def __init__(
        self, model: PolicyModel, ranks: Ranks, *, adapted: bool, master: Callable[[nn.Parameter], Tensor]
    ) -> None:
        self._model, self._ranks, self._adapted, self._master = model, ranks, adapted, master

    def weight(self, own: str, parts: tuple[Part, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._adapted:
            return lora.merged(self._model, own, parts, self._ranks.whole).to(dtype)
        weight = self._model.weight(own)
        if isinstance(weight, nn.Parameter) and weight.dtype != dtype:
            weight = self._master(weight)
        return self._ranks.whole(weight.detach().to(dtype))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """In fp32, by Hugging Face name."""
        if self._ranks.world == 1 and not self._adapted and self._model.dtype == torch.float32:
            return hf_tensors(self._model)
        return (pair for own, parts in self._model.parts() for pair in cut(self.weight(own, parts), parts))

    def copies(self, master: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The same of one rank, copied to the host's memory and put together there."""
        for own, parts in self._model.parts():
            yield from cut(self._copy(own, parts, master), parts)

    def _copy(self, own: str, parts: tuple[Part, ...], master: Callable[[nn.Parameter], Tensor]) -> Tensor:
        if self._adapted:
            return lora.merged(self._model, own, parts, on_host)
        weight = self._model.weight(own)
        if isinstance(weight, nn.Parameter):
            return master(weight)
        return on_host(weight) if self._model.dtype == torch.float32 else on_host(weight).float()

    def source(self, dtype: torch.dtype) -> ShardSource:
        return ShardSource(self._model, self._model.parts(), self.weight, dtype, self._ranks)

    def adapters(self) -> AdapterSource:
        """The adapters alone, in fp32: for engines that have the base weights."""
        return AdapterSource(self._model, self._ranks)


@torch.no_grad()
def likeliest(model: PolicyModel, settings: Trainer, prompts: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """The probe of a version: the log-probability of the likeliest token after each prompt, at temperature 1. All
    prompts are equally long."""
    blocks = [Block(np.array(prompt, np.int32), [NEXT]) for prompt in prompts]
    (batch,) = pack(blocks, sum(map(len, prompts)))
    hidden_L_E = predicting_states(model, batch.to(model.device), settings)
    logits_L_V = all_logits(model, hidden_L_E, narrow=settings.dtype == "bf16")
    return tuple(logits_L_V.float().log_softmax(-1).amax(-1).tolist())
