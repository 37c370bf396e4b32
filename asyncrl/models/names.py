"""Hugging Face tensor names as views into the weights of a model: load, save and weight sync all go through here."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel


class Part(NamedTuple):
    """A Hugging Face tensor within one of our weights."""

    name: str
    rows: int
    """Of the weight; of one with three axes that has several parts, rows of its matrices, one below the other."""
    flat: bool = False
    """It is the single row itself."""


def hf_tensors(model: "PolicyModel") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name; writing into one writes the model.

    A tied `lm_head.weight` is left out, as transformers does when it saves.
    """
    for name, parts in model.parts():
        yield from cut(model.weight(name).detach(), parts)


def cut(tensor: Tensor, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
    """Views by Hugging Face name."""
    rows = [part.rows for part in parts]
    if sum(rows) > len(tensor):
        tensor = tensor.flatten(0, 1)
    for part, view in zip(parts, tensor.split(rows), strict=True):
        yield part.name, view[0] if part.flat else view


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
