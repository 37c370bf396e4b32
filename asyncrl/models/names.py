"""Hugging Face tensor names as views into our fused weights: load, save and weight sync all go through here."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from asyncrl.models.decoder import Decoder, Layer


class Part(NamedTuple):
    """A Hugging Face tensor within one of our parameters."""

    name: str
    rows: int
    flat: bool = False
    """It is the single row itself."""


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name; writing into one writes the model.

    A tied `lm_head.weight` is left out, as transformers does when it saves.
    """
    for name, parts in hf_parts(model):
        yield from cut(model.get_parameter(name).detach(), parts)


def cut(tensor: Tensor, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Views by Hugging Face name."""
    for part, view in zip(parts, tensor.split([part.rows for part in parts]), strict=True):
        yield part.name, view[0] if part.flat else view


def hf_parts(model: Decoder) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """What each parameter of the model, by our name, is made of; the parameters may be shards."""
    cfg = model.config
    yield "embed_tokens.weight", (Part("model.embed_tokens.weight", cfg.vocabulary),)
    for index, layer in enumerate(model.blocks()):
        for name, parts in _layer(layer):
            yield f"layers.{index}.{name}", tuple(p._replace(name=f"model.layers.{index}.{p.name}") for p in parts)
    yield "norm", (Part("model.norm.weight", cfg.hidden_size),)
    if model.lm_head is not None:
        yield "lm_head.weight", (Part("lm_head.weight", cfg.vocabulary),)


def unpacked(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Experts by their own names, also where all of a layer are one tensor, as transformers holds them."""
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        if not module.endswith(".mlp.experts"):
            yield name, tensor
            continue
        for number, matrix in enumerate(tensor):
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                yield f"{module}.{number}.gate_proj.weight", gate
                yield f"{module}.{number}.up_proj.weight", up
            else:
                yield f"{module}.{number}.{kind}.weight", matrix


def _layer(layer: Layer) -> Iterator[tuple[str, tuple[Part, ...]]]:
    cfg = layer.config
    query, key = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    yield "input_norm", (Part("input_layernorm.weight", cfg.hidden_size),)
    yield from _linear("qkv_proj", layer.qkv_proj, "self_attn", {"q_proj": query, "k_proj": key, "v_proj": key})
    yield from _linear("o_proj", layer.o_proj, "self_attn", {"o_proj": cfg.hidden_size})
    if layer.qk_norm is not None:
        yield "qk_norm", tuple(Part(f"self_attn.{kind}_norm.weight", 1, flat=True) for kind in "qk")
    yield "mlp_norm", (Part("post_attention_layernorm.weight", cfg.hidden_size),)
    if layer.experts is None:
        gated = {"gate_proj": cfg.intermediate_size, "up_proj": cfg.intermediate_size}
        yield from _linear("gate_up_proj", layer.gate_up_proj, "mlp", gated)
        yield from _linear("down_proj", layer.down_proj, "mlp", {"down_proj": cfg.hidden_size})
    else:
        experts = layer.experts.config
        names = [f"mlp.experts.{number}" for number in range(experts.count)]
        both = [Part(f"{name}.{kind}_proj.weight", experts.width) for name in names for kind in ("gate", "up")]
        yield "experts.router", (Part("mlp.gate.weight", experts.count),)
        yield "experts.gate_up", tuple(both)
        yield "experts.down", tuple(Part(f"{name}.down_proj.weight", cfg.hidden_size) for name in names)


def _linear(own: str, fused: nn.Linear, prefix: str, rows: dict[str, int]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    for kind, _ in fused.named_parameters():  # weight and, where there is one, bias
        yield f"{own}.{kind}", tuple(Part(f"{prefix}.{name}.{kind}", count) for name, count in rows.items())
