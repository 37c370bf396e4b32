"""Arrow record batches that somebody else may have written: everything is checked before memory is taken for it.

The schema is ours and never read from the bytes, so no extension type and no dictionary can come in. What the bytes
still decide is how long things are: Arrow checks that buffers lie within the message, but a compressed one says itself
how large it gets, up to 2^63 bytes.
"""

import struct
from collections.abc import Mapping
from typing import Any, cast

import pyarrow

pa = cast(Any, pyarrow)  # its type stubs are incomplete: half of what is used here is unknown to them

START = 8
"""A marker and the length of the metadata come before it."""
MESSAGE_HEADER, BATCH_NODES, BATCH_COMPRESSION = 2, 1, 3
"""Places of fields in the tables `Message` and `RecordBatch` of Arrow's format."""


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
