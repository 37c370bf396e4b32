"""What every Hugging Face `config.json` says, whatever the family: no more than engines of others' models need."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncrl.errors import CheckpointError

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
POSITIONS = ("max_position_embeddings", "n_positions")


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    layers: int
    positions: int | None
    """Tokens of the longest sequence that the model was made for; None: it does not say."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Outline":
        """A model that also sees or hears has its text model in a part of its own."""
        text = cast(Mapping[str, Any], raw.get("text_config", raw))
        return cls(layers=_first(text, LAYERS) or 0, positions=_first(text, POSITIONS))


def read_outline(directory: Path) -> Outline:
    return Outline.of(read_raw(directory))


def read_raw(directory: Path) -> dict[str, Any]:
    """All of `config.json` of a Hugging Face model directory."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} is not a Hugging Face model directory (no config.json); give the path of one, "
            f"such as `huggingface-cli download NAME --local-dir {directory}` makes"
        )
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; download the checkpoint again") from None


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((raw[name] for name in names if isinstance(raw.get(name), int)), None)
