"""Where published tensors come from, and in what order they may leave.

A trainer of several ranks holds shards. To gather a tensor every rank has to take part, to send it only the first. If
the first rank sends while the others are already in the next gather, each side waits for the other, forever. So both
take turns, bucket by bucket: all gathers of a bucket are complete on every rank before any of it is sent, and no rank
begins the next bucket before it is sent.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from asyncrl.types import SendOrder, TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.manifest import NamedTensors, Range, cut, layout


class Source(Protocol):
    """The weights of the trainer's ranks. Every rank makes the same calls in the same order."""

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        """What will be gathered, for one publication, and its size in bytes."""
        ...

    def gather(self, spec: TensorSpec) -> torch.Tensor | None:
        """The whole tensor on the rank that sends; None on the others."""
        ...

    def fence(self) -> None:
        """Returns when every rank has come here."""
        ...


class OneRank:
    """A trainer that holds every tensor whole. `tensors` is called for each publication."""

    def __init__(self, tensors: Callable[[], NamedTensors]) -> None:
        self._tensors = tensors
        self._named: dict[str, torch.Tensor] = {}

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        self._named = dict(self._tensors())
        return layout(self._named.items())

    def gather(self, spec: TensorSpec) -> torch.Tensor:
        return self._named.pop(spec.name)

    def fence(self) -> None: ...


Tensors = Source | Callable[[], NamedTensors]
"""Where a writer's tensors come from."""


def source_of(tensors: Tensors) -> Source:
    return OneRank(tensors) if callable(tensors) else tensors


class Follower:
    """What a rank that sends nothing does instead of writing: it takes its part in the gathers."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        specs, total = self._source.layout()
        for _ in gathered(self._source, Flat(specs, torch.empty(0, dtype=torch.uint8)), cut(total)):
            pass
        return WeightManifest(version=version, tensors=specs, total_bytes=total, digest="", location="")

    def close(self) -> None: ...


def gathered(source: Source, flat: Flat, ranges: list[Range]) -> Iterator[Range]:
    """Fill `flat`, and yield each bucket when it may be sent; the next is gathered once the caller asks for it."""
    waiting = list(reversed(flat.specs))
    for offset, size in ranges:
        while waiting and waiting[-1].offset < offset + size:
            spec = waiting.pop()
            tensor = source.gather(spec)
            if tensor is not None:
                flat.put(spec, tensor)
        source.fence()
        yield offset, size
        source.fence()


def fill(source: Source, flat: Flat) -> Flat:
    """Gather everything; what is sent afterwards is behind the last fence."""
    for _ in gathered(source, flat, cut(len(flat.memory))):
        pass
    return flat
