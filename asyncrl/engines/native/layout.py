"""How the engine holds the weights: laid out and multiplied for the fewest and fastest operations per step.

It matters for small models on a CPU, where a step is a hundred operations of a few microseconds each.
"""

import torch
from torch import Tensor, nn

from asyncrl.models.decoder import Decoder, LayerTensors, Tensors


def store_by_columns(model: nn.Module) -> None:
    """Lay the matrices out so that their transpose is contiguous, names and values unchanged.

    A small batch times a row-major weight takes a slow path in torch on ARM, 2 to 4 times slower at 16 to 64 rows.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t(), requires_grad=False)


@torch.no_grad()
def decoding_tensors(model: Decoder, max_length: int) -> tuple[Tensors, Tensor]:
    """What decoding computes with, and the output matrix; to be called once after each load of weights.

    In fp32 the scales of the normalisations are multiplied into the matrices behind them, in place. In a narrower
    dtype that would round the weights once more than the trainer does.
    """
    tensors = model.tensors(max_length)
    head_E_V = model.output_matrix.t().contiguous()
    if model.norm.dtype != torch.float32:
        return tensors, head_E_V
    assert tensors.norm.scale is not None
    head_E_V.mul_(tensors.norm.scale[:, None])
    layers = [_fold(layer.tensors()).forward for layer in model.blocks()]
    return tensors._replace(layers=layers, norm=tensors.norm.unscaled()), head_E_V


def _fold(layer: LayerTensors) -> LayerTensors:
    assert layer.input_norm.scale is not None
    assert layer.mlp_norm.scale is not None
    layer.qkv.mul_(layer.input_norm.scale[:, None])
    layer.gate_up.mul_(layer.mlp_norm.scale[:, None])
    return layer._replace(input_norm=layer.input_norm.unscaled(), mlp_norm=layer.mlp_norm.unscaled())
