"""A trainer's side of LoRA without training: adapters that change on demand, published alone or merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.trainer import Lora
from asyncrl.config.weights import TransportName
from asyncrl.models import lora
from asyncrl.models.checkpoint import load_model, save_model
from asyncrl.models.names import cut
from asyncrl.training.adapter_source import AdapterSource
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.types import WeightManifest
from asyncrl.weights.gather import OneRank, Source
from asyncrl.weights.transports.base import Writer
from asyncrl.weights.transports.registry import make_writer

LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "gate_proj", "down_proj"))
"""Of fused matrices only some parts."""


class Adapted:
    def __init__(self, path: Path, settings: Lora = LORA) -> None:
        self.model, _ = load_model(path)
        lora.attach(self.model, settings, seed=0)

    def become(self, version: int) -> None:
        """Other adapters for each version; at 0, those that change nothing."""
        generator = torch.Generator().manual_seed(version)
        for _, _, adapter in self.model.adapted():
            for factor, size in ((adapter.A, 0.1), (adapter.B, 0.1 * (version > 0))):
                factor.data = size * torch.randn(factor.shape, generator=generator)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        for own, parts in self.model.parts():
            yield from cut(lora.merged(self.model, own, parts, lambda tensor: tensor), parts)

    def saved(self, version: int, directory: Path) -> PreTrainedModel:
        """The merged model, as transformers reads it."""
        self.become(version)
        save_model(self.model, directory, tensors=self.merged())
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @property
    def bytes(self) -> int:
        """Of adapters in fp32."""
        return sum(4 * (each.A.numel() + each.B.numel()) for _, _, each in self.model.adapted())


class Publishing:
    def __init__(self, trainer: Adapted, writer: Writer) -> None:
        self.trainer, self._writer = trainer, writer

    def __call__(self, version: int, *, like: int | None = None) -> WeightManifest:
        """`like`: with the adapters of another version."""
        self.trainer.become(version if like is None else like)
        return self._writer.publish(version)


@contextmanager
def publishing_adapters(
    path: Path,
    settings: Lora = LORA,
    *,
    transport: TransportName = "shared_memory",
    whole: bool = False,
    delta: bool = False,
) -> Iterator[Publishing]:
    trainer = Adapted(path, settings)
    source: Source = OneRank(trainer.merged) if whole else AdapterSource(trainer.model, Ranks())
    writer = make_writer(source, transport, prefix="test", delta=delta)
    try:
        yield Publishing(trainer, writer)
    finally:
        writer.close()
