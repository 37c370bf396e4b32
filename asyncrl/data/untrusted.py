"""Arrow record batches and Parquet files that somebody else may have written, checked before memory is taken for them.

Record batches: the schema is ours and never read from the bytes, so no extension type and no dictionary can come in.
What the bytes still decide is how long things are: Arrow checks that buffers lie within the message, but a compressed
one says itself how large it gets, up to 2^63 bytes. Parquet files: plain columns only, of a size that is read first.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow

from asyncrl.errors import AsyncRLError, CorruptSegmentError
from asyncrl.system.storage import reading

pa = cast(Any, pyarrow)  # its type stubs are incomplete: half of what is used here is unknown to them

START = 8
"""Where the metadata of a message begins: a marker and the length of the metadata come before it."""
MESSAGE_HEADER, BATCH_NODES, BATCH_COMPRESSION = 2, 1, 3
"""Numbers of fields in the tables `Message` and `RecordBatch` of Arrow's format."""
MAX_BYTES = 1 << 30
"""Of all columns of a Parquet file once they are unpacked; a run of a million steps stays below it."""
EXTENSION = b"ARROW:extension:name"


def read_batch(payload: bytes, schema: Any, what: str, wider: Mapping[int, Any] | None = None) -> Any:
    """The record batch, fully validated, or ValueError with what is wrong with it.

    `wider` are schemas with more columns, by the number of nodes (columns, and items of lists) that tells them.
    """
    try:
        batch_table = _field(payload, START + struct.unpack_from("<I", payload, START)[0], MESSAGE_HEADER)
        if batch_table is None or _field(payload, batch_table, BATCH_COMPRESSION) is not None:
            raise ValueError(f"not {what}: compressed, or no record batch")
        if wider and (nodes := _field(payload, batch_table, BATCH_NODES)) is not None:
            schema = wider.get(_read("<I", payload, nodes), schema)
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise ValueError(f"not {what}: {error}") from None
    return batch


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where the table that field `number` refers to begins; None when the field is absent. (The flatbuffer format.)"""
    layout = table - _read("<i", data, table)
    place = 4 + 2 * number
    offset = _read("<H", data, layout + place) if place < _read("<H", data, layout) else 0
    return table + offset + _read("<I", data, table + offset) if offset else None


def _read(form: str, data: bytes, offset: int) -> int:
    if offset < 0:  # struct would count from the end
        raise ValueError("an offset before the beginning")
    return struct.unpack_from(form, data, offset)[0]


def read_table(path: Path) -> Any:
    """The table, fully validated, or CorruptSegmentError with what is wrong with it, or the disk's StorageError."""
    from pyarrow import parquet  # slow to import, and many who could read a table do not

    try:
        with reading(path), cast(Any, parquet).ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(file, path)
            table = file.read()
        table.validate(full=True)
    except AsyncRLError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptSegmentError(f"{path} cannot be read: {error}") from None
    return table


def _check_columns(file: Any, path: Path) -> None:
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
