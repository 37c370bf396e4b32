"""A trainer's part of a publication in FP8."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config import Rollout, Run
from asyncrl.config.engine import EngineSettings, NativeEngine
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.precision.publication import Fp8Publication
from asyncrl.types import WeightManifest
from asyncrl.weights.gather import OneRank
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter


class Publishing:
    def __init__(
        self,
        path: Path,
        precision: Any,
        device: Any = "cpu",
        *,
        dtype: torch.dtype = torch.float32,
        engine: EngineSettings | None = None,
        **rollout: Any,
    ) -> None:
        """`device` is that of our engine: to a GPU weights travel in FP8. `dtype`: what the trainer computes in."""
        self.model, config = load_model(path, dtype)
        run = Run(rollout=Rollout(precision=precision, **rollout), engine=engine or NativeEngine(device=device))
        self.fp8 = Fp8Publication(run, config)
        source = self.fp8.travelling(OneRank(lambda: hf_tensors(self.model)))
        self.writer = SharedMemoryWriter(source, prefix="test")

    def grow(self, factor: float, part: str = "v_proj") -> None:
        for name, tensor in hf_tensors(self.model):
            if part in name:
                tensor.mul_(factor)

    def publish(self, version: int) -> WeightManifest:
        in_fp8 = self.fp8.of(self.model)
        return msgspec.structs.replace(self.writer.publish(version), fp8=in_fp8())


@contextmanager
def publishing(path: Path, precision: Any, device: Any = "cpu", **rollout: Any) -> Iterator[Publishing]:
    made = Publishing(path, precision, device, **rollout)
    try:
        yield made
    finally:
        made.writer.close()
