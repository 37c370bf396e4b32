"""Adapters on their way to engines that have the base weights."""

import torch
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.models import lora
from asyncrl.models.adapters import Adapter
from asyncrl.models.policy import PolicyModel
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.types import TensorSpec
from asyncrl.weights.manifest import layout


class AdapterSource:
    """Adapters alone for a publication, in fp32: those of all layers and experts in one tensor, B with its scale."""

    def __init__(self, model: PolicyModel, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        adapted = [(module, adapter) for module, _, adapter in model.adapted()]
        self._modules: dict[str, list[Adapter]] = lora.stacks(adapted)
        if sum(map(len, self._modules.values())) < len(adapted):
            raise CheckpointError(
                f"adapters of {model.config.architecture} cannot be published: names such as {adapted[0][0]} do not "
                "say which layer it is; set trainer.lora.rank=0 to train every weight"
            )

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        self._ranks.settle(self._model)
        return layout(
            (module + kind, torch.stack([each.by_expert(torch.empty(shape, device="meta")) for each in found]))
            for module, found in self._modules.items()
            for kind, shape in ((lora.A, found[0].A.shape), (lora.B, found[0].B.shape))
        )

    def gather(self, spec: TensorSpec) -> Tensor | None:
        down = spec.name.endswith(lora.A)
        adapters = self._modules[spec.name.removesuffix(lora.A if down else lora.B)]
        parts = [each.by_expert(self._ranks.whole((each.A if down else each.B).detach())) for each in adapters]
        if self._ranks.rank > 0:
            return None
        found = torch.stack(parts).float()
        return found if down else found * adapters[0].scale

    def fence(self) -> None:
        self._ranks.fence()
