"""Hugging Face tensor names as views into our fused weights: load, save and weight sync all go through here."""

from collections.abc import Iterator

from torch import Tensor, nn

from asyncrl.models.decoder import Decoder, Layer


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name; writing into one writes the model.

    A tied `lm_head.weight` is left out, as transformers does when it saves.
    """
    yield "model.embed_tokens.weight", model.embed_tokens.weight.detach()
    for index, layer in enumerate(model.blocks()):
        for name, tensor in _layer(layer):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", model.norm.detach()
    if model.lm_head is not None:
        yield "lm_head.weight", model.lm_head.weight.detach()


def _layer(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    cfg = layer.config
    query, key = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    yield "input_layernorm.weight", layer.input_norm.detach()
    yield from _parts("self_attn", layer.qkv_proj, {"q_proj": query, "k_proj": key, "v_proj": key})
    yield from _parts("self_attn", layer.o_proj, {"o_proj": cfg.hidden_size})
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", layer.qk_norm.detach()[0]
        yield "self_attn.k_norm.weight", layer.qk_norm.detach()[1]
    yield "post_attention_layernorm.weight", layer.mlp_norm.detach()
    yield from _parts("mlp", layer.gate_up_proj, dict.fromkeys(("gate_proj", "up_proj"), cfg.intermediate_size))
    yield from _parts("mlp", layer.down_proj, {"down_proj": cfg.hidden_size})


def _parts(prefix: str, fused: nn.Linear, widths: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for kind, tensor in fused.named_parameters():  # weight and, where there is one, bias
        for name, view in zip(widths, tensor.detach().split(list(widths.values())), strict=True):
            yield f"{prefix}.{name}.{kind}", view
