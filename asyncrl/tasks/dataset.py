"""Prompts from a Hugging Face dataset: one of the hub's, or a directory that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.optional import require
from asyncrl.refusals import did_you_mean
from asyncrl.tasks.rows import Rows, check_columns, make_prompts
from asyncrl.tasks.settings import DatasetTask
from asyncrl.types import Prompt


class Dataset(Rows):
    def __init__(self, settings: DatasetTask, seed: int) -> None:
        super().__init__(_read_dataset(settings), settings.held_out, seed, settings.name)


def _read_dataset(settings: DatasetTask) -> list[Prompt]:
    data = _split(settings, _load(settings))
    try:
        columns = check_columns(settings, data.column_names)
    except ValueError as error:
        raise ConfigError(f"task.name={settings.name}: {error}") from None
    return make_prompts(data.select_columns(columns), settings, f"{Path(settings.name).name}/{settings.split}")


def _load(settings: DatasetTask) -> Any:
    datasets = require("datasets", extra="datasets")
    path = Path(settings.name).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(settings.name, settings.config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"task.name={settings.name} cannot be loaded: {error}; give a dataset of the hub, or a directory that "
            "save_to_disk wrote"
        ) from None


def _split(settings: DatasetTask, data: Any) -> Any:
    """One split of several; a saved dataset may also have none."""
    if not isinstance(data, dict):
        return data
    if settings.split not in data:
        raise ConfigError(
            f"task.name={settings.name} has no split {settings.split!r}: {did_you_mean(settings.split, data)}"
        )
    return data[settings.split]
