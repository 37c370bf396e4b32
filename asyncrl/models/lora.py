"""A model with adapters: how they are attached, published, merged into the weights, and kept in peft's format.

peft itself puts layers of its own in the place of the modules that a model calls. The modules of our decoder are never
called, they only own parameters (asyncrl.models.decoder), and several projections share one; so the arithmetic is ours,
for models of transformers too, and what is on disk is what peft reads.

Published are the adapters of all layers as one tensor, under a name with `*` for the number of the layer, and with
another for that of the expert: a large model has hundreds of them, and each would cost trainer and engines a call. A
projection that only some layers have, in a model with dense layers among those of experts, keeps their numbers.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from asyncrl.config.trainer import Lora
from asyncrl.models.adapters import EVERY, Adapter
from asyncrl.models.names import Part, cut
from asyncrl.models.policy import PolicyModel

A, B = ".lora_A.weight", ".lora_B.weight"
"""End the names of adapters, after that of the module that they belong to."""
PEFT_PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Whole = Callable[[Tensor], Tensor]
"""All of a parameter, of which there may be only a part here."""
_LAYER = re.compile(r"(.+?\.(?:layers|h|blocks)\.)(\d+)(\..+)")
_EVERY_LAYER = re.compile(r"(\.(?:layers|h|blocks)\.)\*(?=\.)")
EVERY_EXPERT = f".experts.{EVERY}."
_EXPERT = re.compile(r"\.experts\.\d+\.")
T = TypeVar("T")


def attach(model: PolicyModel, settings: Lora, seed: int) -> None:
    """From here on only adapters are trained."""
    model.requires_grad_(False)
    model.adapt(settings, torch.Generator().manual_seed(seed))


def modules(module: str, adapter: Adapter) -> list[str]:
    """The names of what one adapter of `adapted` belongs to."""
    if adapter.experts is None:
        return [module]
    return [module.replace(EVERY, str(expert)) for expert in range(adapter.experts)]


def adapter_parts(model: PolicyModel) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """As `PolicyModel.parts`, of the adapters alone."""
    for module, own, adapter in model.adapted():
        names = modules(module, adapter)
        yield f"{own}.A", tuple(Part(name + A, adapter.A.shape[0] // len(names)) for name in names)
        yield f"{own}.B", tuple(Part(name + B, adapter.B.shape[0] // len(names)) for name in names)


def parameter(model: PolicyModel, own: str) -> Tensor:
    """A parameter as it is published: B with its scale, so that nobody else has to know it."""
    tensor = model.get_parameter(own).detach()
    return tensor * cast(Adapter, model.get_submodule(own[:-2])).scale if own.endswith(".B") else tensor


def merged(model: PolicyModel, own: str, parts: Sequence[Part], whole: Whole) -> Tensor:
    """One of the model's weights with its adapters in it, in fp32; every rank has to ask."""
    tensor = whole(model.weight(own).detach()).float()
    wanted = {for_experts(part.name.removesuffix(".weight")) for part in parts}
    factors = dict[str, tuple[Tensor, Tensor]]()
    for module, name, adapter in model.adapted():
        if module not in wanted:
            continue
        names = [f"{each}.weight" for each in modules(module, adapter)]
        down, up = (whole(parameter(model, f"{name}.{kind}")).chunk(len(names)) for kind in "AB")
        factors |= dict(zip(names, zip(down, up, strict=True), strict=True))
    if not factors:
        return tensor
    return torch.cat([merge(each, *factors[name]) if name in factors else each for name, each in cut(tensor, parts)])


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
    """What layers have, in their order, under names for all layers, or under their own where some layers lack it; what
    is no layer's is left out."""
    found: dict[str, dict[int, T]] = {}
    for name, value in named:
        every, layer = split_layer(name)
        if layer is not None:
            found.setdefault(every, {})[layer] = value
    layers = {layer for of in found.values() for layer in of}
    stacked: dict[str, list[T]] = {}
    for name, of in found.items():
        if of.keys() == layers:
            stacked[name] = [of[layer] for layer in sorted(of)]
        else:
            stacked |= {name.replace(EVERY, str(layer), 1): [value] for layer, value in of.items()}
    return stacked


def split_layer(name: str) -> tuple[str, int | None]:
    """The name for all layers, and which of them it is; a name that is no layer's stays as it is."""
    match = _LAYER.fullmatch(name)
    return (name, None) if match is None else (match[1] + EVERY + match[3], int(match[2]))


def for_experts(name: str) -> str:
    """The name for all experts of a layer."""
    return _EXPERT.sub(EVERY_EXPERT, name)


def unstacked(published: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Views, by the names of their own layers and experts."""
    found: dict[str, Tensor] = {}
    for name, every in published:
        for layer, part in enumerate(every):
            own = _EVERY_LAYER.sub(rf"\g<1>{layer}", name)
            if EVERY_EXPERT in own:
                found |= {own.replace(EVERY, str(expert)): each for expert, each in enumerate(part)}
            else:
                found[own] = part
    return found


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
