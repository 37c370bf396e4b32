"""A decoder with adapters: how they are attached, published, merged into the weights, and kept in peft's format.

peft itself puts layers of its own in the place of the modules that a model calls. Our modules are never called, they
only own parameters (asyncrl.models.decoder), and several projections share one; so the arithmetic is ours, and what is
on disk is what peft reads.

Published are the adapters of all layers as one tensor, under a name with `*` for the number of the layer: a large model
has hundreds of them, and each would cost trainer and engines a call.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from asyncrl.config.trainer import Lora
from asyncrl.models.adapters import Adapter, Adapters
from asyncrl.models.config import ATTENTION, projection_shapes
from asyncrl.models.decoder import Decoder
from asyncrl.models.names import Part

A, B = ".lora_A.weight", ".lora_B.weight"
"""End the names of adapters, after that of the module that they belong to."""
PEFT_PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Whole = Callable[[Tensor], Tensor]
"""All of a parameter, of which there may be only a part here."""
EVERY = "*"
_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
T = TypeVar("T")


def attach(model: Decoder, settings: Lora, seed: int) -> None:
    """From here on only adapters are trained."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.blocks():
        adapters = Adapters(projection_shapes(model.config), settings.targets, settings.rank, settings.alpha, generator)
        layer.adapters = adapters.to(layer.input_norm.device)


def adapted(model: Decoder) -> Iterator[tuple[str, str, Adapter]]:
    """Hugging Face name of the module, our name of its adapter, and the adapter."""
    for index, layer in enumerate(model.blocks()):
        for name, adapter in layer.adapters.of.items() if layer.adapters is not None else ():
            part = "self_attn" if name in ATTENTION else "mlp"
            yield f"model.layers.{index}.{part}.{name}", f"layers.{index}.adapters.of.{name}", cast(Adapter, adapter)


def adapter_parts(model: Decoder) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """As `hf_parts`, of the adapters alone."""
    for module, own, adapter in adapted(model):
        yield f"{own}.A", (Part(module + A, adapter.A.shape[0]),)
        yield f"{own}.B", (Part(module + B, adapter.B.shape[0]),)


def parameter(model: Decoder, own: str) -> Tensor:
    """A parameter as it is published: B with its scale, so that nobody else has to know it."""
    tensor = model.get_parameter(own).detach()
    return tensor * cast(Adapter, model.get_submodule(own[:-2])).scale if own.endswith(".B") else tensor


def merged(model: Decoder, own: str, parts: Iterable[Part], whole: Whole) -> Tensor:
    """One of the model's parameters with its adapters in it, in fp32; every rank has to ask."""
    adapters = {module + ".weight": name for module, name, _ in adapted(model)}
    tensor = whole(model.get_parameter(own).detach()).float()
    begin = 0
    for part in parts:
        rows = slice(begin, begin := begin + part.rows)
        if (name := adapters.get(part.name)) is not None:
            down, up = (whole(parameter(model, f"{name}.{kind}")) for kind in "AB")
            tensor = torch.cat([tensor[: rows.start], merge(tensor[rows], down, up), tensor[rows.stop :]])
    return tensor


def merge(weight: Tensor, down_R_E: Tensor, scaled_up_X_R: Tensor) -> Tensor:
    """In the number format of the weight, and with sums in fp32: the one way in which trainer and engines add it up."""
    return torch.addmm(weight, scaled_up_X_R.to(weight.dtype), down_R_E.to(weight.dtype))


def merged_tensors(base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors by Hugging Face name, with adapters, by the names of their own layers, in them."""
    for name, tensor in base:
        module = name.removesuffix(".weight")
        down, up = adapters.get(module + A), adapters.get(module + B)
        yield name, tensor if down is None or up is None else merge(tensor, down, up)


def stacks(named: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """What layers have, in their order, under names for all layers; what is no layer's is left out."""
    found: dict[str, dict[int, T]] = {}
    for name, value in named:
        every, layer = split_layer(name)
        if layer is not None:
            found.setdefault(every, {})[layer] = value
    return {name: [value for _, value in sorted(of.items())] for name, of in found.items()}


def split_layer(name: str) -> tuple[str, int | None]:
    """The name for all layers, and which of them it is; a name that is no layer's stays as it is."""
    match = _LAYER.fullmatch(name)
    return (name, None) if match is None else (match[1] + EVERY + match[3], int(match[2]))


def unstacked(published: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Views, by the names of their own layers."""
    return {name.replace(EVERY, str(layer)): part for name, every in published for layer, part in enumerate(every)}


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def peft_config(settings: Lora, base: Path) -> str:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(settings.targets),
        "bias": "none",
        "inference_mode": True,
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
