"""The manifest of a training checkpoint: what it holds, with a checksum of each file, itself included.

It is written last, so a checkpoint that has one was complete. `damage` reads every byte again before the checkpoint is
used. Checkpoints of older releases have no checksums; of them only the manifest is read.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.buffer.consumed import EarlierGroups
from asyncrl.errors import CheckpointError
from asyncrl.system.storage import crc32c, file_crc32c, reading, sync

MANIFEST = "manifest.json"
UNSIGNED = "0" * 8
"""In place of the manifest's own checksum while that is computed."""


class FileChecksum(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    crc32c: str


class TrainingManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the checkpoint contains."""

    step: int
    """Optimizer steps taken; also the policy version of the weights."""
    samples_trained: int
    consumed: tuple[tuple[int, int], ...]
    """Group ids trained on, as inclusive ranges, but for the oldest."""
    earlier: EarlierGroups | None = None
    """Of those; None: all are named."""
    least_drift: float | None = None
    """What `Caution` has seen, put in by `save`; None: nothing yet, or an older checkpoint."""
    momentum_ages: float = 0.0
    """`Momentum.ages`, put in by `save`."""
    files: dict[str, FileChecksum] = msgspec.field(default_factory=dict[str, FileChecksum])
    """Every other file, put in by `write_manifest`; empty: an older checkpoint."""
    checksum: str = ""
    """Of the manifest's own bytes with `UNSIGNED` here; the last field, so that it is the last such text."""


class Chosen(NamedTuple):
    """Which checkpoint to use."""

    newest: tuple[int, Path] | None
    """The newest sound one and its step."""
    damaged: list[tuple[Path, str]]
    """Newer ones, each with what is wrong with it."""

    @property
    def sentences(self) -> list[str]:
        used = self.newest[1].name if self.newest else "the weights that the run began with"
        return [f"checkpoint {path.name} is damaged: {what}; {used} is used" for path, what in self.damaged]


def write_manifest(manifest: TrainingManifest, checkpoint: Path) -> None:
    """Sync the files that are there, then write the manifest with their checksums."""
    files: dict[str, FileChecksum] = {}
    for name, path in sorted(_files(checkpoint)):
        files[name] = FileChecksum(bytes=path.stat().st_size, crc32c=_text(file_crc32c(path)))
        sync(path)
    for folder in (path for path in checkpoint.rglob("*") if path.is_dir()):
        sync(folder)
    unsigned = msgspec.structs.replace(manifest, files=files, checksum=UNSIGNED)
    raw = msgspec.json.format(msgspec.json.encode(unsigned))
    (checkpoint / MANIFEST).write_bytes(_with_checksum(raw, UNSIGNED, _text(crc32c(0, raw))))
    sync(checkpoint / MANIFEST)
    sync(checkpoint)


def read_manifest(checkpoint: Path) -> TrainingManifest:
    found = _read(checkpoint / MANIFEST)
    if isinstance(found, str):
        raise CheckpointError(f"{checkpoint / MANIFEST} {found}; remove {checkpoint} to resume from the one before")
    return found


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, by file; empty if every byte is as it was written. StorageError if the disk does
    not give them, which is no damage."""
    with reading(checkpoint):
        return _damage(checkpoint)


def _damage(checkpoint: Path) -> str:
    manifest = _read(checkpoint / MANIFEST)
    if isinstance(manifest, str):
        return f"{MANIFEST} {manifest}"
    if checkpoint.name != f"step-{manifest.step}":
        return f"it holds the manifest of step {manifest.step}"
    found = dict(_files(checkpoint))
    for name, written in manifest.files.items():
        if (path := found.get(name)) is None:
            return f"{name} is missing"
        if (size := path.stat().st_size) != written.bytes:
            return f"{name} has {size} bytes and not {written.bytes}"
        if _text(file_crc32c(path)) != written.crc32c:
            return f"the checksum of {name} does not match"
    return ""


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = [(int(path.name.removeprefix("step-")), path) for path in directory.glob("step-*") if path.is_dir()]
    return sorted(found)


def choose(directory: Path) -> Chosen:
    """The newest checkpoint that is sound; none is changed."""
    damaged: list[tuple[Path, str]] = []
    for step, path in reversed(numbered(directory)):
        if not (problem := damage(path)):
            return Chosen((step, path), damaged)
        damaged.append((path, problem))
    return Chosen(None, damaged)


def set_damaged_aside(directory: Path) -> list[str]:
    """Rename damaged checkpoints to `damaged-step-N`, newest first, until one is sound; says what was done."""
    chosen = choose(directory)
    for path, _ in chosen.damaged:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return chosen.sentences


def _read(path: Path) -> TrainingManifest | str:
    """A manifest, or what is wrong with it."""
    try:
        with reading(path):
            raw = path.read_bytes()
        manifest = msgspec.json.decode(raw, type=TrainingManifest)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    unsigned = _with_checksum(raw, manifest.checksum, UNSIGNED)
    if manifest.checksum and manifest.checksum != _text(crc32c(0, unsigned)):
        return "cannot be trusted (its checksum does not match)"
    return manifest


def _files(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Besides the manifest, by the path in the checkpoint."""
    for path in checkpoint.rglob("*"):
        if path.is_file() and path != checkpoint / MANIFEST:
            yield path.relative_to(checkpoint).as_posix(), path


def _with_checksum(raw: bytes, old: str, new: str) -> bytes:
    before, _, after = raw.rpartition(old.encode() or b"\0")
    return before + new.encode() + after


def _text(checksum: int) -> str:
    return f"{checksum:08x}"
