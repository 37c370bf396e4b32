"""Damage to the files of a run that is down: what a crash leaves, and what a bad disk does."""

import random
from pathlib import Path
from typing import NamedTuple

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.log import HEADER_SIZE, OPEN, Scan, segment_paths

LONGEST_TEAR = 2000
SCHEMAS = {payloads.STEM: payloads.SCHEMA_HASH, journal.STEM: journal.SCHEMA_HASH}


class Flip(NamedTuple):
    """One byte that is not what it was."""

    path: Path
    offset: int

    def toggle(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            byte = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([byte ^ 0xFF]))


def tear(directory: Path, rng: random.Random) -> Path | None:
    """Leave an unfinished write at the end of an open file, if there is one."""
    files = [path for stem in SCHEMAS for path in segment_paths(directory, stem) if path.suffix == OPEN]
    if not files:
        return None
    path = rng.choice(files)
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, LONGEST_TEAR)))
    return path


def flip(directory: Path, rng: random.Random) -> Flip | None:
    """Flip a byte where that cannot be mistaken for a torn write: anywhere but in the last frame of an open file."""
    ends = {path: _certain(path, schema) for stem, schema in SCHEMAS.items() for path in segment_paths(directory, stem)}
    places = [(path, end) for path, end in ends.items() if end]
    if not places:
        return None
    path, end = rng.choice(places)
    flipped = Flip(path, rng.randrange(end))
    flipped.toggle()
    return flipped


def _certain(path: Path, schema: bytes) -> int:
    """The first byte where a flip would look like a torn write."""
    if path.suffix != OPEN:
        return path.stat().st_size
    offsets = [frame.offset for frame in Scan(path, schema=schema)]
    return offsets[-1] if len(offsets) > 1 else min(HEADER_SIZE, offsets[0] if offsets else 0)
