"""A publication on its way into the tensors that decoding reads."""

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Protocol

from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Move
from asyncrl.types import TensorSpec
from asyncrl.weights.flat import Flat


class Update(Protocol):
    @property
    def place(self) -> Hashable:
        """Where on the device the publication lies; None: it is elsewhere."""
        ...

    def find(self, name: str) -> Tensor:
        """A tensor as it will be held, on the device. Scales are asked for behind their values."""
        ...

    def load(self, names: Iterable[str] | None = None) -> None:
        """All of it, or what has these names."""
        ...


class CopyUpdate:
    """Whole weights."""

    def __init__(self, flat: Flat, held: dict[str, Tensor], at_once: Callable[[Flat], None] | None) -> None:
        """`at_once` makes all moves together; without it, as from elsewhere, they are made one by one."""
        self._flat, self._held, self._at_once = flat, held, at_once

    @property
    def place(self) -> Hashable:
        memory, device = self._flat.memory, next(iter(self._held.values())).device
        return (memory.data_ptr(), hash(self._flat.specs)) if memory.device == device else None

    def find(self, name: str) -> Tensor:
        """A view is made when it is asked for, as Python takes long to make all of them."""
        return self._flat.tensor(self._specs[name]).to(self._held[name].device)

    def load(self, names: Iterable[str] | None = None) -> None:
        if names is None and self._at_once is not None:
            self._at_once(self._flat)
            return
        wanted = self._held if names is None else set(names)
        for spec in self._flat.specs:
            if spec.name in wanted:
                Move(spec, self._held[spec.name]).make(self._flat)

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self._flat.specs}
