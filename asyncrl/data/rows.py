"""Rows of tables that somebody else wrote: JSON lines, Parquet, Hugging Face datasets.

`field` is the setting that names the table, as in `task.path`, for errors. Each is a ConfigError that says where the
table is wrong, and what to do.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import pyarrow
from pyarrow import parquet

from asyncrl.config.errors import did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.system.optional import require

pa, pq = cast(Any, pyarrow), cast(Any, parquet)  # their type stubs are incomplete
T = TypeVar("T")
Columns = Callable[[Sequence[str]], list[str]]
"""Of the columns that there are, those to read; ValueError if one is missing."""


class Line(NamedTuple):
    """A line of a file, or an item of its array."""

    place: str
    uid: str
    data: bytes

    def read(self, decode: Callable[[bytes, str], T], example: str) -> T:
        """`decode` raises ValueError with what is wrong; `example` is a line as it should be."""
        try:
            self.data.decode()
        except UnicodeDecodeError as error:
            byte = self.data[error.start]
            raise ConfigError(
                f"{self.place}: not UTF-8 at byte {error.start + 1} (0x{byte:02x}, {chr(byte)!r} in Latin-1): convert "
                "the file, as with `iconv -f latin1 -t utf-8`"
            ) from None
        try:
            return decode(self.data, self.uid)
        except (msgspec.DecodeError, ValueError) as error:
            whole = ", all of it on one line" if "truncated" in str(error) else ""
            raise ConfigError(f"{self.place}: {error}; expected an object such as {example}{whole}") from None


def read_lines(path: Path, field: str) -> list[Line]:
    """Those that are not blank."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}={path} cannot be read: {error.strerror}") from None
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{field}={path} is UTF-16: convert it with `iconv -f utf-16 -t utf-8`")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    items = _array(raw)
    what, lines = ("line", raw.splitlines()) if items is None else ("item", items)
    return [
        Line(f"{path}, {what} {number}", f"{path.name}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _array(raw: bytes) -> list[bytes] | None:
    """The items of a file that is one JSON array, as some programs write it; None if it is none."""
    if not raw.lstrip().startswith(b"["):
        return None
    try:
        return [bytes(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, UnicodeDecodeError):  # its lines say where it is wrong
        return None


def parquet_files(path: Path, field: str) -> list[Path]:
    """The file, or all of a directory."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{field}={path} is a directory without a .parquet file")
    return files


def read_parquet(file: Path, field: str, columns: Columns) -> list[dict[str, Any]]:
    """Only the columns that are asked for."""
    try:
        with pq.ParquetFile(file) as opened:
            return opened.read(columns(opened.schema_arrow.names)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{field}={file} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{field}={file}: {error}") from None


def is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def read_dataset(name: str, config: str, split: str, field: str, columns: Columns) -> Iterator[Mapping[str, Any]]:
    """Of the Hugging Face hub, or a directory that `save_to_disk` wrote."""
    data = _split(_load(name, config, field), name, split, field)
    try:
        wanted = columns(data.column_names)
    except ValueError as error:
        raise ConfigError(f"{field}={name}: {error}") from None
    return iter(data.select_columns(wanted))


def _load(name: str, config: str, field: str) -> Any:
    datasets = require("datasets", extra="datasets")
    path = Path(name).expanduser()
    try:
        if is_saved_dataset(path):
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{field}={name} cannot be loaded: {error}; give a dataset of the hub, or a directory that save_to_disk "
            "wrote"
        ) from None


def _split(data: Any, name: str, split: str, field: str) -> Any:
    """One split of several; a saved dataset may also have none."""
    if not isinstance(data, dict):
        return data
    if split not in data:
        raise ConfigError(f"{field}={name} has no split {split!r}: {did_you_mean(split, data)}")
    return data[split]
