"""What training asks of a model, whoever wrote it: packed tokens in, hidden states out, and names for its weights.

`Decoder` (asyncrl.models.decoder) is our own; `TransformersModel` (asyncrl.models.transformers_model) wraps a class of
Hugging Face's. Algorithms, corrections, LoRA, ranks, the critic, checkpoints and publication know this class only.

Axis suffixes: T tokens, E hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asyncrl.config.trainer import Lora
from asyncrl.models.adapters import Adapter
from asyncrl.models.config import ModelConfig
from asyncrl.models.experts import Route
from asyncrl.models.head import UNSHAPED, LogitShape
from asyncrl.models.layers import Exchange, Indices
from asyncrl.models.names import Part

if TYPE_CHECKING:
    from asyncrl.models.execution import Execution

Packing = Literal["shared", "packed", "padded"]
"""How samples lie in a forward: one behind the other with the prompt of a group once; one behind the other, each with
its own prompt; or each as a padded row."""


class Adapted(NamedTuple):
    """A projection with an adapter."""

    module: str
    """Its name in checkpoints, with `*` for all experts of a layer."""
    own: str
    """Our name of the adapter."""
    adapter: Adapter


class Taps:
    """Collects the residual stream on its way: `layers` counts the layers before each place, 0 is the embedding."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self.found_T_E: list[Tensor] = []

    def see(self, layer: int, x_T_E: Tensor) -> None:
        if layer in self.layers:
            self.found_T_E.append(x_T_E)


class PolicyModel(nn.Module, ABC):
    """A causal language model that is trained."""

    config: ModelConfig
    packing: Packing = "shared"
    logit_shape: LogitShape = UNSHAPED
    """What follows the output matrix."""

    @abstractmethod
    def states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows: Sequence[Indices],
        *,
        narrow: bool,
        taps: Taps | None = None,
        execution: "Execution | None" = None,
        route: Route | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """Final hidden states, normalised and ready for the output matrix. `rows` are the flat tokens that each sample
        consists of; only with `packing="shared"` do they have tokens in common. `narrow`: products in bf16. With an
        `exchange` the tokens are some of those of the rows, and the other ranks have the rest."""

    @property
    @abstractmethod
    def output_matrix(self) -> Tensor:
        """V_E; that of the embeddings where they are tied."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, in order."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        """Our name of each weight, and the tensors of a checkpoint that it is made of; the weight may be a shard. Tied
        weights are there once, as transformers saves them."""

    @abstractmethod
    def redundant(self, name: str) -> bool:
        """Whether a checkpoint may have this tensor although nothing here is made of it."""

    @abstractmethod
    def adapt(self, settings: Lora, generator: torch.Generator) -> None:
        """Put adapters beside the projections that `settings` names."""

    @abstractmethod
    def adapted(self) -> Iterator[Adapted]:
        """Every projection with an adapter."""

    def try_out(self, *, narrow: bool) -> str:
        """Compute a little before the first batch: why samples cannot be packed, or nothing. CheckpointError if our
        head is not that of the model. Every rank has to call it."""
        return ""

    def try_to_compile(self, *, narrow: bool) -> str:
        """Compile layers that are not ours, if they are: why they cannot be, or nothing. Leaves gradients behind."""
        return ""

    def logits(self, hidden_T_E: Tensor) -> Tensor:
        return self.logit_shape(F.linear(hidden_T_E, self.output_matrix))

    def weight(self, own: str) -> Tensor:
        """One that `parts` names: a parameter, or a buffer that is saved like one."""
        module, _, name = own.rpartition(".")
        return getattr(self.get_submodule(module), name)

    def place(self, device: torch.device) -> None:
        """Move what is neither parameter nor buffer."""
