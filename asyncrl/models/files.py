"""The files of a Hugging Face model directory, and what their headers say. Nothing here needs torch."""

import json
import struct
from math import prod
from pathlib import Path

from asyncrl.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
LONGEST_HEADER = 100_000_000
"""As safetensors has it."""


def weight_files(directory: Path) -> list[Path]:
    """Where the weights of a model directory are."""
    index = directory / INDEX
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if index.is_file():
        return [_beside(index, name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise CheckpointError(
        f"{directory} holds no {WEIGHTS} and no {index.name}; pickled weights (.bin) are not read, convert them with "
        f"transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    )


def _beside(index: Path, name: str) -> Path:
    """An index names files of its own directory; one that points elsewhere is not followed."""
    if name != Path(name).name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names {name!r}, which is no .safetensors file beside it; download it again")
    return index.parent / name


def tensor_sizes(directory: Path) -> dict[str, int]:
    """How many numbers each tensor of the files has."""
    found: dict[str, int] = {}
    for path in weight_files(directory):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, LONGEST_HEADER)))
            found |= {name: prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
        except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download the checkpoint again") from None
    return found
