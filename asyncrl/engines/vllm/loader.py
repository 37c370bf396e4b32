"""Inside vLLM's worker process: what is done with a checkpoint as it is read, which vLLM's own loader does not do.

**FP8 by blocks.** `engine.quantization=fp8_per_block` makes vLLM expect a checkpoint in FP8, with scales, because that
is how versions arrive. So the checkpoint becomes FP8 here, as new weights do in the trainer.

**The base of adapters.** With `trainer.lora` versions arrive as adapters, and weights are made of these and of what the
checkpoint holds. So that stays on the device. vLLM counts it as weights when it sees what is left for the cache.

vLLM finds this loader by its load format; the module is imported with worker.py.
"""

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from asyncrl.engines.adapters import Shapes, shapes_of
from asyncrl.engines.vllm.options import ADAPTED, CHECKPOINTS, LOADER
from asyncrl.precision.layers import PROJECTION, SCALES
from asyncrl.precision.quantizer import WEIGHT_BLOCK, quantize

Named = Iterable[tuple[str, Tensor]]


class Base(NamedTuple):
    """What adapters are merged into, in the number format that the engine computes in."""

    tensors: dict[str, Tensor]
    """What is loaded with each version: the adapted projections, or all where layers are loaded as a whole."""
    adapted: Shapes


_bases: WeakKeyDictionary[nn.Module, Base] = WeakKeyDictionary()


def base_of(model: nn.Module) -> Base:
    """Empty for a model that was loaded without adapters in sight."""
    return _bases.get(model, Base({}, {}))


def in_place(model_config: ModelConfig, device: torch.device) -> bool:
    """Whether the model computes with the tensors as they are loaded: then they are overwritten where they lie.

    Quantized, packed (as on CPUs) and fused expert weights are made from the loaded ones, layer by layer.
    """
    return device.type == "cuda" and model_config.quantization is None and not model_config.get_num_experts()


def in_blocks(named: Named, model_config: ModelConfig, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Values and scales of what the model has in FP8 by blocks; where it has nothing so, all as it is."""
    blocks: dict[str, list[str]] | None = getattr(model_config.hf_config, "quantization_config", None)
    for name, tensor in named:
        plain = blocks is None or name.removesuffix(".weight") in blocks["ignored_layers"]  # None: a drafting head
        if plain or PROJECTION.fullmatch(name) is None:
            yield name, tensor
            continue
        found = quantize(tensor.to(device), WEIGHT_BLOCK, name=name)
        yield name, found.values_N_C
        yield name + SCALES, found.scales_B_B


@register_model_loader(LOADER)
class CheckpointLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = load_config.model_loader_extra_config
        self._adapted: list[str] = extra.get(ADAPTED, [])
        plain = dataclasses.replace(load_config, load_format=CHECKPOINTS, model_loader_extra_config={})
        super().__init__(plain)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        device = next(model.parameters()).device
        weights: Named = super().get_all_weights(model_config, model)
        if self._adapted and model_config.runner_type != "draft":
            weights = self._keeping(weights, model_config, model, device)
        yield from in_blocks(weights, model_config, device)

    def _keeping(
        self, weights: Named, model_config: ModelConfig, model: nn.Module, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """All of them, on their way into the model."""
        kept: dict[str, Tensor] = {}
        for name, tensor in weights:
            if self._is_adapted(name) or not in_place(model_config, device):
                kept[name] = tensor.to(device, model_config.dtype, copy=True)
            yield name, tensor
        _bases[model] = Base(kept, shapes_of((name, each) for name, each in kept.items() if self._is_adapted(name)))

    def _is_adapted(self, name: str) -> bool:
        return PROJECTION.fullmatch(name) is not None and name.split(".")[-2] in self._adapted
