"""Inside vLLM's worker process: a checkpoint becomes FP8 by blocks as it is read, as new weights do in the trainer.

`engine.quantization=fp8_per_block` makes vLLM expect a checkpoint in FP8, with scales, because that is how versions
arrive. vLLM finds this loader by its load format; the module is imported with worker.py.
"""

import dataclasses
from collections.abc import Generator

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from asyncrl.engines.vllm.options import BLOCKS, CHECKPOINTS
from asyncrl.precision.layers import PROJECTION, SCALES
from asyncrl.precision.quantizer import WEIGHT_BLOCK, quantize


@register_model_loader(BLOCKS)
class BlockLoader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format=CHECKPOINTS))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, Tensor], None, None]:
        blocks: dict[str, list[str]] | None = getattr(model_config.hf_config, "quantization_config", None)
        device = next(model.parameters()).device
        for name, tensor in super().get_all_weights(model_config, model):
            plain = blocks is None or name.removesuffix(".weight") in blocks["ignored_layers"]  # None: a drafting head
            if plain or PROJECTION.fullmatch(name) is None:
                yield name, tensor
                continue
            found = quantize(tensor.to(device), WEIGHT_BLOCK, name=name)
            yield name, found.values_N_C
            yield name + SCALES, found.scales_B_B
