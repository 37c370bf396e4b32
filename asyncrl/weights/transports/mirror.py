"""Transports that bring bytes instead of mapping them: the receiver holds a mirror of the newest publication.

A mirror is also what a sparse delta changes, and what an engine loads from only when every bucket has been checked.

A sparse delta has only the elements that differ from an earlier publication, bit for bit. Few of a policy's bf16
weights change in one step: an update is often smaller than the distance to the next number. An element costs its value
and a place of four bytes, so this pays below a third of changed bf16, or half of changed fp32.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors, fill, source_of
from asyncrl.weights.manifest import NamedTensors, layout
from asyncrl.weights.transports.shared_memory import Alternating

INDICES, VALUES = "#indices", "#values"
INDEX = torch.int32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Carrier(Protocol):
    """How bytes leave the trainer."""

    def send(self, manifest: WeightManifest, flat: Flat, order: SendOrder) -> str:
        """Begin to give `flat` to the order's members; returns the location. `flat` stays as it is until the next."""
        ...

    def close(self) -> None: ...


Bring = Callable[[WeightManifest, Flat], None]
"""How bytes arrive: fills the memory with what the manifest's location leads to."""


class MirrorWriter:
    """The trainer's side: every byte, or only what has changed since the publication before."""

    def __init__(self, tensors: Tensors, carrier: Carrier, *, sparse: bool, device: torch.device | str = "cpu") -> None:
        self._source = source_of(tensors)
        self._carrier = carrier
        self._sparse = sparse
        self._device = device
        self._flats: dict[int, Flat] = {}
        self._places = Alternating()
        self._last: tuple[Flat, str] | None = None

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        order = order or SendOrder()
        specs, total = self._source.layout()
        slot = self._places.slot(version)
        if slot not in self._flats or self._flats[slot].specs != specs:
            self._flats[slot] = Flat.empty(specs, total, self._device)
        flat = self._flats[slot]
        base = self._last
        if base is not None and base[0] is flat:  # the same version again: what it was made from is not known any more
            base = None
        manifest = sealed(version, fill(self._source, flat))
        self._last = flat, manifest.digest
        changed = changes(base[0], flat) if self._sparse and base and not order.dense else None
        if base is None or changed is None:
            return msgspec.structs.replace(manifest, location=self._carrier.send(manifest, flat, order))
        payload = packed(version, changed, self._device)
        location = self._carrier.send(payload[0], payload[1], order)
        return msgspec.structs.replace(
            manifest, base=base[1], delta=msgspec.structs.replace(payload[0], location=location)
        )

    def close(self) -> None:
        self._carrier.close()
        self._flats.clear()
        self._last = None


def sealed(version: int, flat: Flat) -> WeightManifest:
    buckets, digest = flat.seal()
    return WeightManifest(
        version=version,
        tensors=flat.specs,
        total_bytes=len(flat.memory),
        digest=digest,
        location="",
        buckets=buckets,
    )


def packed(version: int, named: dict[str, torch.Tensor], device: torch.device | str) -> tuple[WeightManifest, Flat]:
    specs, total = layout(named.items())
    flat = Flat.empty(specs, total, device)
    for spec in specs:
        flat.put(spec, named[spec.name])
    return sealed(version, flat), flat


class Mirror:
    """One receiver's copy. It holds a publication whole, or none."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._flat: Flat | None = None
        self._digest = ""
        self._location = ""

    def receive(self, manifest: WeightManifest, bring: Bring) -> Flat:
        """The published bytes, checked; WeightSyncError if they did not arrive whole."""
        location = (manifest.delta or manifest).location
        # By the location and not the digest: in a broadcast of what is here already the others still need this rank.
        if self._flat is not None and self._location == location:
            return self._flat
        flat = self._changed(manifest, bring) if manifest.delta is not None else self._brought(manifest, bring)
        _check(manifest, flat)
        self._flat, self._digest, self._location = flat, manifest.digest, location
        return flat

    def _brought(self, manifest: WeightManifest, bring: Bring) -> Flat:
        """Every byte, over those of the version before."""
        flat = self._flat
        self._flat, self._digest = None, ""  # nothing to build on until all of it has arrived
        if flat is None or flat.specs != manifest.tensors:
            flat = Flat.receiving(manifest, self._device)
        bring(manifest, flat)
        return flat

    def _changed(self, manifest: WeightManifest, bring: Bring) -> Flat:
        sparse, flat = manifest.delta, self._flat
        assert sparse is not None
        if flat is None or self._digest != manifest.base:
            raise WeightSyncError(
                f"version {manifest.version} came as changes to weights with digest {manifest.base}, and "
                f"{self._digest or 'none'} is here; send every byte"
            )
        payload = Flat.receiving(sparse, self._device)
        bring(sparse, payload)
        _check(sparse, payload)
        self._flat, self._digest = None, ""
        apply(flat, payload.tensors())
        return flat


def _check(manifest: WeightManifest, flat: Flat) -> None:
    wrong = flat.missing(manifest.buckets)
    if wrong:
        raise WeightSyncError(
            f"weights of version {manifest.version}: {len(wrong)} of {len(manifest.buckets)} buckets are not what was "
            f"published, the first at byte {wrong[0].offset}; publish again"
        )


def changes(old: Flat, new: Flat) -> dict[str, torch.Tensor] | None:
    """Places and new values for each tensor that differs; None if every byte takes no more room than that."""
    if old.specs != new.specs or any(size > torch.iinfo(INDEX).max for size in _elements(new)):
        return None
    found: dict[str, torch.Tensor] = {}
    room = len(new.memory)
    for (name, before), (_, after) in zip(old.tensors(), new.tensors(), strict=True):
        indices = (_bits(before) != _bits(after)).nonzero().squeeze(1)
        room -= len(indices) * (INDEX.itemsize + after.element_size())
        if room <= 0:
            return None
        if len(indices):
            found[name + INDICES] = indices.to(INDEX)
            found[name + VALUES] = after.reshape(-1)[indices]
    return found


def apply(base: Flat, changed: NamedTensors) -> None:
    """Turn the publication that the changes were made from into the new one, in place."""
    found = dict(changed)
    for name, tensor in base.tensors():
        if name + INDICES in found:
            indices = found[name + INDICES].to(tensor.device, torch.int64)
            _bits(tensor)[indices] = _bits(found[name + VALUES].to(tensor.device))


def _elements(flat: Flat) -> list[int]:
    return [spec.bytes // getattr(torch, spec.dtype).itemsize for spec in flat.specs]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: two numbers that compare equal, such as 0.0 and -0.0, may differ in their bits."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])
