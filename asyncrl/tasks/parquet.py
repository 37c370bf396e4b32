"""Prompts from Parquet: a file, or a directory of them."""

from pathlib import Path
from typing import Any, cast

import pyarrow
from pyarrow import parquet

from asyncrl.errors import ConfigError
from asyncrl.tasks.rows import Rows, check_columns, make_prompts
from asyncrl.tasks.settings import ParquetTask
from asyncrl.types import Prompt

pa, pq = cast(Any, pyarrow), cast(Any, parquet)  # their type stubs are incomplete


class Parquet(Rows):
    def __init__(self, settings: ParquetTask, seed: int) -> None:
        super().__init__(_read_parquet(settings), settings.held_out, seed, settings.path)


def _read_parquet(settings: ParquetTask) -> list[Prompt]:
    path = Path(settings.path).expanduser()
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"task.path={path} is a directory without a .parquet file")
    rows = (row for file in files for row in _rows(file, settings))
    return make_prompts(rows, settings, path.name)


def _rows(file: Path, settings: ParquetTask) -> list[dict[str, Any]]:
    """Only the columns that are asked for."""
    try:
        with pq.ParquetFile(file) as opened:
            columns = check_columns(settings, opened.schema_arrow.names)
            return opened.read(columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"task.path={file} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"task.path={file}: {error}") from None
