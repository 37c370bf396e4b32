"""Routes: the experts of each token in each layer, which the engine chose and the trainer replays.

As bytes they are [tokens, layers, active] without a header: one byte for an expert, or two in a model with more than
256. Layers without experts are left out. Nothing here needs torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.config import Run
from asyncrl.models.config import ModelConfig

Routes = npt.NDArray[np.uint8 | np.uint16]


class RouteShape(NamedTuple):
    """Of one model."""

    layers: tuple[int, ...]
    """Those that have experts."""
    active: int
    """Experts of a token."""
    experts: int

    @classmethod
    def of(cls, model: ModelConfig) -> "RouteShape | None":
        """None for a model without experts, and for one whose experts are chosen in the code of transformers."""
        if model.experts is None or model.backend == "transformers":
            return None
        layers = tuple(layer for layer in range(model.layers) if model.experts_of(layer) is not None)
        return cls(layers, model.experts.active, model.experts.count)

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.experts <= 256 else np.uint16

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.active * np.dtype(self.dtype).itemsize

    def read(self, data: bytes) -> Routes:
        """T_L_C: whole tokens only."""
        return np.frombuffer(data, self.dtype).reshape(-1, len(self.layers), self.active)

    def write(self, found: Sequence[Routes]) -> bytes:
        """Of pieces, each T_L_C, that have all layers of the model."""
        return b"".join(np.asarray(each[:, self.layers], self.dtype).tobytes() for each in found)


def replayed_shape(run: Run, model: ModelConfig) -> RouteShape | None:
    """Of the routes that the run's trajectories carry; None where its trainer replays none."""
    return RouteShape.of(model) if run.replays_routes else None
