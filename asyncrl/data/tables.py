"""Parquet files that somebody else may have written: plain columns, of a size that is looked at first."""

from pathlib import Path
from typing import Any, cast

import pyarrow

from asyncrl.errors import CorruptSegmentError

pa = cast(Any, pyarrow)  # its type stubs are incomplete

MAX_BYTES = 1 << 30
"""Of all columns together once they are unpacked; a run of a million steps stays below it."""
EXTENSION = b"ARROW:extension:name"


def read_table(path: Path) -> Any:
    """The table, fully validated, or CorruptSegmentError with what is wrong with it."""
    from pyarrow import parquet  # slow to import, and many who could read a table do not

    try:
        with cast(Any, parquet).ParquetFile(path) as file:
            _check(file, path)
            table = file.read()
        table.validate(full=True)
    except CorruptSegmentError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptSegmentError(f"{path} cannot be read: {error}") from None
    return table


def _check(file: Any, path: Path) -> None:
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    size = sum(abs(group.total_byte_size) + 8 * abs(group.num_rows) * group.num_columns for group in groups)
    if size > MAX_BYTES:
        raise CorruptSegmentError(f"{path} would take {size} bytes, and {MAX_BYTES} are allowed")
    for field in file.schema_arrow:
        if not _is_plain(field):
            kind = "of an extension type" if EXTENSION in (field.metadata or {}) else f"{field.type}"
            raise CorruptSegmentError(f"{path}: column {field.name!r} is {kind}; only plain types are read")


def _is_plain(field: Any) -> bool:
    """Whether it is made of numbers and text. An extension type that nobody has registered shows in its metadata."""
    if EXTENSION in (field.metadata or {}):
        return False
    types = pa.types
    if types.is_list(field.type) or types.is_struct(field.type):
        return all(_is_plain(field.type.field(index)) for index in range(field.type.num_fields))
    return any(is_kind(field.type) for is_kind in (types.is_primitive, types.is_string, types.is_null))
