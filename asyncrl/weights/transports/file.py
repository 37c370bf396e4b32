"""Weights through a file in safetensors layout: for hosts that share a disk, and for a replica that joins late."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from asyncrl.errors import StorageError, WeightSyncError
from asyncrl.system.storage import storing
from asyncrl.types import SendOrder, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors
from asyncrl.weights.transports.base import Transport, WriterOptions
from asyncrl.weights.transports.mirror import Mirror, MirrorWriter
from asyncrl.weights.transports.shared_memory import shared_directory

SCHEME = "file:"
KEPT = 2
"""Files that stay: a slow receiver may still read the one before the newest."""


class File(Transport):
    """Each publication is a file; receivers hold a copy of the newest in memory."""

    scheme = SCHEME
    verifies = True

    def __init__(self) -> None:
        self._mirror = Mirror()

    def writer(self, tensors: Tensors, options: WriterOptions) -> MirrorWriter:
        carrier = FileCarrier(options.folder or shared_directory(options.prefix))
        return MirrorWriter(tensors, carrier, sparse=options.delta)

    def read(self, manifest: WeightManifest) -> Flat:
        return self._mirror.receive(manifest, bring)


def write(manifest: WeightManifest, flat: Flat, folder: Path) -> Path:
    """Whole or not at all, for the owner alone."""
    path = folder / f"version-{manifest.version}-{manifest.digest}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        with storing(path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600))
            save_file({name: tensor.cpu() for name, tensor in flat.tensors()}, partial)
            partial.chmod(0o600)
            partial.replace(path)
    except StorageError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # what it has is room for others
        raise
    return path


def bring(manifest: WeightManifest, flat: Flat) -> None:
    path = Path(manifest.location.removeprefix(SCHEME))
    try:
        with safe_open(path, framework="pt") as found:
            for spec in flat.specs:
                flat.put(spec, found.get_tensor(spec.name))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"version {manifest.version} cannot be read from {path}: {error}") from None


class FileCarrier:
    """The trainer's side: each publication is a new file, and the oldest go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: list[Path] = []

    def send(self, manifest: WeightManifest, flat: Flat, order: SendOrder) -> str:
        path = write(manifest, flat, self._folder)
        self._written = [*(old for old in self._written if old != path), path]
        for old in self._written[:-KEPT]:
            old.unlink(missing_ok=True)
        self._written = self._written[-KEPT:]
        return f"{SCHEME}{path}"

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
