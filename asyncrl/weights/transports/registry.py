"""Every transport by its name, and what is done with whichever was chosen: a manifest's `location` says which it was.

A new one is a file with a `Transport`, a line here, and its name with a line in `asyncrl.config.weights`.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from asyncrl.config.weights import TransportName
from asyncrl.types import WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors
from asyncrl.weights.transports import file
from asyncrl.weights.transports.base import Transport, Writer, WriterOptions
from asyncrl.weights.transports.cuda_ipc import CudaIpc
from asyncrl.weights.transports.nccl import Nccl
from asyncrl.weights.transports.shared_memory import SharedMemory

TRANSPORTS: dict[TransportName, Transport] = {
    "shared_memory": SharedMemory(),
    "cuda_ipc": CudaIpc(),
    "nccl": Nccl(),
    "file": file.File(),
}


def make_writer(
    tensors: Tensors,
    transport: TransportName,
    *,
    prefix: str,
    folder: Path | None = None,
    deadline_s: float = 120.0,
    delta: bool = False,
) -> Writer:
    """The trainer's side. `tensors` is called for each publication; `folder` is where the file transport writes."""
    return TRANSPORTS[transport].writer(tensors, WriterOptions(prefix, folder, deadline_s, delta))


def read_published(manifest: WeightManifest, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a publication, on `device`: views of the trainer's memory where they can be."""
    return ((name, tensor.to(device)) for name, tensor in published(manifest).tensors())


def digest_published(manifest: WeightManifest) -> str:
    """Digest of the bytes that a receiver here finds at the manifest's location."""
    flat = published(manifest)
    return manifest.digest if _of(manifest).verifies else flat.digest()


def published(manifest: WeightManifest) -> Flat:
    """The bytes of a publication, brought here if they have to be."""
    return _of(manifest).read(manifest)


def addressed_to(manifest: WeightManifest, name: str) -> WeightManifest:
    """The manifest for one receiver. Most transports have the same for all."""
    sparse = addressed_to(manifest.delta, name) if manifest.delta is not None else None
    location = _of(manifest).addressed(manifest, name) if manifest.location else ""
    return msgspec.structs.replace(manifest, location=location, delta=sparse)


def serves_late_joiners(manifest: WeightManifest) -> bool:
    """Whether an engine that was not there at the publication can load it as it is."""
    return manifest.delta is None and _of(manifest).joinable


def to_file(manifest: WeightManifest, folder: Path) -> WeightManifest:
    """The same publication as a file, written by whoever can reach it: for a replica that joins late."""
    path = file.write(manifest, published(manifest), folder)
    return msgspec.structs.replace(manifest, location=f"{file.SCHEME}{path}", base="", delta=None)


def _of(manifest: WeightManifest) -> Transport:
    """The one with the longest scheme that the location begins with; a plain path has none."""
    location = manifest.location if manifest.delta is None else manifest.delta.location
    fitting = [each for each in TRANSPORTS.values() if location.startswith(each.scheme)]
    return max(fitting, key=lambda each: len(each.scheme))
