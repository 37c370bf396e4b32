"""Weights of which a rank holds only some rows: how they come out of files, and whole into a publication."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from asyncrl.errors import CheckpointError
from asyncrl.models.checkpoint import check_names
from asyncrl.models.files import weight_files
from asyncrl.models.names import Part, cut
from asyncrl.models.policy import PolicyModel
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.types import TensorSpec
from asyncrl.weights.manifest import layout


class TensorFiles:
    """The tensors of safetensors files, of which nothing is read until it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
            self._files |= dict.fromkeys(opened.keys(), (path, opened))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        return self._files[name][1].get_tensor(name)

    def rows(self, name: str, rows: range, shape: Sequence[int]) -> Tensor:
        """Of a tensor of this shape."""
        path, opened = self._files[name]
        found = opened.get_slice(name)
        if tuple(found.get_shape()) != tuple(shape):
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(found.get_shape())} and not {tuple(shape)}: it is of another model"
            )
        return found[rows.start : rows.stop]


Write = Callable[[nn.Parameter, Tensor], None]
"""Puts a weight where its master is."""


def fill(model: PolicyModel, directory: Path, ranks: Ranks, write: Write | None = None) -> None:
    """Read the rows of this rank out of a checkpoint in Hugging Face layout; `write` is for one rank."""
    files = TensorFiles(weight_files(directory))
    check_names(directory, model, files.names)
    with torch.no_grad():
        for name, fused in model.parts():
            weight = model.weight(name)
            if rows := ranks.rows(weight):
                found = _fused_rows(files, fused, rows, weight.shape)
                if write is not None and isinstance(weight, nn.Parameter):
                    write(weight, found)
                else:
                    ranks.mine(weight).copy_(found)


def _fused_rows(files: TensorFiles, parts: Sequence[Part], rows: range, whole: Sequence[int]) -> Tensor:
    """Of a weight whose whole shape this is."""
    depth = sum(part.rows for part in parts) // whole[0]  # above 1: parts are rows of its matrices
    rows, row_shape = range(rows.start * depth, rows.stop * depth), whole[1:] if depth == 1 else whole[2:]
    found: list[Tensor] = []
    begin = 0
    for part in parts:
        here = range(max(rows.start - begin, 0), min(rows.stop - begin, part.rows))
        begin += part.rows
        if here:
            wanted, shape = (range(row_shape[0]), row_shape) if part.flat else (here, (part.rows, *row_shape))
            read = files.rows(part.name, wanted, shape)
            found.append(read[None] if part.flat else read)
    return torch.cat(found).view(-1, *whole[1:])


@torch.no_grad()
def read_rows(files: TensorFiles, name: str, target: Tensor, ranks: Ranks) -> None:
    """Those of a tensor that are here."""
    if rows := ranks.rows(target):
        ranks.mine(target).copy_(files.rows(name, rows, target.shape))


@torch.no_grad()
def read_parts(files: TensorFiles, parts: Sequence[Part], target: Tensor, ranks: Ranks) -> None:
    """The same of one that is made of several."""
    if rows := ranks.rows(target):
        ranks.mine(target).copy_(_fused_rows(files, parts, rows, target.shape))


Read = Callable[[str, tuple[Part, ...], torch.dtype], Tensor]
"""(our name of a parameter, what it is made of, dtype) -> all of it, on every rank."""


class ShardSource:
    """Parameters of all ranks for a publication (asyncrl.weights.gather): one is whole at a time."""

    def __init__(
        self,
        model: PolicyModel,
        parts: Iterable[tuple[str, tuple[Part, ...]]],
        read: Read,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self._model, self._parts, self._read, self._dtype, self._ranks = model, dict(parts), read, dtype, ranks
        self._within = {part.name: own for own, within in self._parts.items() for part in within}
        self._found: dict[str, Tensor | None] = {}

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        self._found.clear()
        self._ranks.settle(self._model)
        shapes = {own: self._model.weight(own).shape for own in self._parts}
        meta = {own: torch.empty(shape, dtype=self._dtype, device="meta") for own, shape in shapes.items()}
        return layout(pair for own, parts in self._parts.items() for pair in cut(meta[own], parts))

    def gather(self, spec: TensorSpec) -> Tensor | None:
        if spec.name not in self._found:
            own = self._within[spec.name]
            parts = self._parts[own]
            whole = self._read(own, parts, self._dtype)
            self._found = dict(cut(whole, parts)) if self._ranks.rank == 0 else dict.fromkeys(p.name for p in parts)
        return self._found.pop(spec.name)

    def fence(self) -> None:
        self._ranks.fence()
