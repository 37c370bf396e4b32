"""Hugging Face tensor names as views into our fused weights: load, save and weight sync all go through here."""

from collections.abc import Iterator

from torch import Tensor, nn

from asyncrl.models.decoder import Attention, Decoder, Layer, Mlp


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name; writing into one writes the model.

    A tied `lm_head.weight` is left out, as transformers does when it saves.
    """
    yield "model.embed_tokens.weight", model.embed_tokens.weight.detach()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for name, tensor in _layer(layer):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", model.norm.weight.detach()
    if model.lm_head is not None:
        yield "lm_head.weight", model.lm_head.weight.detach()


def _layer(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_layernorm.weight.detach()
    yield from _attention(layer.attention)
    yield "post_attention_layernorm.weight", layer.post_attention_layernorm.weight.detach()
    yield from _mlp(layer.mlp)


def _attention(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    widths = [count * attention.head_dim for count in (attention.heads, attention.kv_heads, attention.kv_heads)]
    yield from _split("self_attn", attention.qkv_proj, ("q_proj", "k_proj", "v_proj"), widths)
    yield from _split("self_attn", attention.o_proj, ("o_proj",), [attention.o_proj.out_features])
    if attention.qk_norm is not None:
        yield "self_attn.q_norm.weight", attention.qk_norm.detach()[0]
        yield "self_attn.k_norm.weight", attention.qk_norm.detach()[1]


def _mlp(mlp: Mlp) -> Iterator[tuple[str, Tensor]]:
    yield from _split("mlp", mlp.gate_up_proj, ("gate_proj", "up_proj"), [mlp.gate_up_proj.out_features // 2] * 2)
    yield from _split("mlp", mlp.down_proj, ("down_proj",), [mlp.down_proj.out_features])


def _split(prefix: str, fused: nn.Linear, names: tuple[str, ...], widths: list[int]) -> Iterator[tuple[str, Tensor]]:
    for name, view in zip(names, fused.weight.detach().split(widths), strict=True):
        yield f"{prefix}.{name}.weight", view
    if fused.bias is not None:
        for name, view in zip(names, fused.bias.detach().split(widths), strict=True):
            yield f"{prefix}.{name}.bias", view
