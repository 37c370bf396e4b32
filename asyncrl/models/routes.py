"""Routes: the experts that a mixture chose for each token in each layer, as engines record and the trainer replays them.

As bytes they are [tokens, layers, active] without a header, one byte an expert, or two where a layer has more than 256.
Layers without experts are left out. Nothing here needs torch.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.config import Run
from asyncrl.models.config import ModelConfig

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class RouteShape(NamedTuple):
    """Of one model."""

    layers: tuple[int, ...]
    """Those that have experts."""
    active: int
    dtype: type[np.uint8] | type[np.uint16]

    @classmethod
    def of(cls, model: ModelConfig) -> "RouteShape | None":
        """None for a model without experts."""
        if model.experts is None:
            return None
        layers = tuple(layer for layer in range(model.layers) if model.experts_of(layer) is not None)
        return cls(layers, model.experts.active, np.uint8 if model.experts.count <= 256 else np.uint16)

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.active * np.dtype(self.dtype).itemsize

    def read(self, data: bytes) -> Routes:
        """T_L_C: whole tokens only."""
        return np.frombuffer(data, self.dtype).reshape(-1, len(self.layers), self.active)


def replayed_shape(run: Run, model: ModelConfig) -> RouteShape | None:
    """Of the routes that the run's trajectories carry; None where its trainer replays none."""
    return RouteShape.of(model) if run.rollout.replays_routes(run.engine) else None
