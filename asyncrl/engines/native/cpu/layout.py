"""How the engine holds the weights: laid out and multiplied for the fewest and fastest operations per step.

It matters for small models on a CPU, where a step is a hundred operations of a few microseconds each.
"""

import torch
from torch import Tensor, nn

from asyncrl.models.decoder import Decoder, LayerTensors, Tensors
from asyncrl.models.experts import ExpertTensors
from asyncrl.models.layers import NormScale, interleaved, tabled_rotation


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

    The weights of the model are changed in place: columns of queries and keys are interleaved for `tabled_rotation`,
    and in fp32 the scales of the normalisations are multiplied into the matrices behind them. In a narrower dtype
    that would round the weights once more than the trainer does.
    """
    norm = NormScale.of(model.norm, model.config.norm_eps)
    layers = [interleave(layer.tensors()) for layer in model.blocks()]
    head_E_V = model.output_matrix.t().contiguous()
    if norm.scale is not None and model.norm.dtype == torch.float32:
        head_E_V.mul_(norm.scale[:, None])
        layers, norm = [_fold(layer) for layer in layers], norm.unscaled()
    rotation = tabled_rotation(model.frequencies_D, max_length)
    return Tensors(model.embed_tokens.weight, rotation, [layer.forward for layer in layers], norm), head_E_V


def interleave(layer: LayerTensors) -> LayerTensors:
    """Columns of queries and keys in the order of `tabled_rotation`, in place."""
    heads, order_D = layer.heads + layer.kv_heads, interleaved(layer.head_dim)
    order_X = (torch.arange(heads)[:, None] * layer.head_dim + order_D).flatten()
    for columns in (layer.qkv, layer.qkv_bias):
        if columns is not None:
            columns[..., : len(order_X)] = columns[..., order_X]
    if layer.qk_norm is None or layer.qk_norm.scale is None:
        return layer
    return layer._replace(qk_norm=layer.qk_norm._replace(scale=layer.qk_norm.scale[..., order_D]))


def _fold(layer: LayerTensors) -> LayerTensors:
    assert layer.input_norm.scale is not None
    assert layer.mlp_norm.scale is not None
    layer.qkv.mul_(layer.input_norm.scale[:, None])
    if isinstance(layer.mlp, ExpertTensors):  # all of them and the router would have to be multiplied
        return layer._replace(input_norm=layer.input_norm.unscaled())
    layer.mlp.gate_up.mul_(layer.mlp_norm.scale[:, None])
    return layer._replace(input_norm=layer.input_norm.unscaled(), mlp_norm=layer.mlp_norm.unscaled())
