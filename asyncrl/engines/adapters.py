"""Versions that are published as LoRA adapters alone: engines have the base weights, and merge."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.models import lora
from asyncrl.types import WeightManifest

Shapes = Mapping[str, tuple[int, ...]]
"""Layers, experts if there are any, outputs and inputs of matrices, by names for all layers and experts."""


def has_adapters(manifest: WeightManifest) -> bool:
    return any(lora.is_adapter(spec.name) for spec in manifest.tensors)


def adapted_shapes(manifest: WeightManifest) -> Shapes:
    """Of the matrices that the adapters belong to."""
    found, shapes = {spec.name: spec.shape for spec in manifest.tensors}, dict[str, tuple[int, ...]]()
    for name, (*every, outputs, _) in ((name, shape) for name, shape in found.items() if name.endswith(lora.B)):
        module = name.removesuffix(lora.B)
        shapes[f"{module}.weight"] = (*every, outputs, found[module + lora.A][-1])
    return shapes


def shapes_of(named: Iterable[tuple[str, Tensor]]) -> Shapes:
    of_layers: dict[str, list[tuple[int, ...]]] = {}
    for name, tensor in named:
        of_layers.setdefault(lora.for_experts(name), []).append(tuple(tensor.shape))
    experts = lora.EVERY_EXPERT
    shapes = {name: (len(each), *each[0]) if experts in name else each[0] for name, each in of_layers.items()}
    return {name: (len(found), *found[0]) for name, found in lora.stacks(shapes.items()).items()}


def check_adapters(manifest: WeightManifest, adapted: Shapes, engine: str) -> None:
    """That the adapters are those of exactly these matrices; any other would keep what an earlier version gave it."""
    differing = sorted(adapted_shapes(manifest).items() ^ adapted.items())
    if differing:
        names = ", ".join(f"{name} {shape}" for name, shape in differing[:5])
        raise WeightSyncError(
            f"{engine}: adapters of version {manifest.version} belong to other matrices than the engine was started "
            f"for, differing in {names}; start trainer and engine with the same model and trainer.lora"
        )
