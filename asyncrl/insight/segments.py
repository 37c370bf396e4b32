"""A trajectory log as Arrow columns, a file at a time: a million answers within a second.

Every trajectory is a record batch of its own, and to open a million of them one by one takes minutes. Here the fields
of all rows of a file are found together, with positions as arrays. They are not looked up in Arrow's metadata: buffers
follow one another in the order of the columns, each filled up to eight bytes, so the length of one tells where the next
begins. The last one must end where the frame ends, or the file is refused.

Texts and lists stay in the mapped file and are views into it: nobody touches tokens but the query that names them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow

from asyncrl.buffer import payloads
from asyncrl.data.arrow import COLUMNS, TEXT
from asyncrl.data.ipc import START
from asyncrl.insight.logs import Framed, Positions, framed_files

pa = cast(Any, pyarrow)  # its type stubs are incomplete

THREADS = 2
ROWS = 16384
"""Looked at together: what is found of them stays in the processor's cache."""
SHIFTS = {"<i4": 2, "<i8": 3, "<f8": 3}
"""From a byte to the number that begins there, by form: Arrow aligns them."""
FORMS = {pa.int64(): "<i8", pa.int32(): "<i4", pa.float64(): "<f8"}
INLINE = 12
"""Bytes of a text that Arrow's views hold themselves."""
KEPT = np.where(np.arange(INLINE) < np.arange(INLINE + 1)[:, None], 255, 0).astype("u1")
"""Of a text's first twelve bytes, by its length."""
HEAD_MASKS = np.concatenate([np.zeros((INLINE + 1, 4), "u1"), KEPT[:, :4]], axis=1).view("<i8").ravel()
TAIL_MASKS = np.ascontiguousarray(KEPT[:, 4:]).view("<i8").ravel()
NAMES = {"group": "group_id"}
"""Columns that have another name in SQL, where the one in the log is a keyword."""


def _kind(kind: Any) -> Any:
    if kind == TEXT:
        return pa.string_view()
    return pa.list_view(kind.value_type) if pa.types.is_list(kind) else kind


SCHEMA: Any = pa.schema(
    [
        ("sequence", pa.int64()),
        *((NAMES.get(name, name), _kind(kind)) for name, kind in COLUMNS.items()),
        ("parts", pa.string_view()),
        ("unsigned_versions", pa.list_view(pa.uint32())),
    ]
)
"""The last one is `versions` once more: where a token was given, -1 is the largest number, so that the least of all is
the oldest version that was sampled."""


def read_trajectories(directory: Path) -> Iterator[Any]:
    """A table for each file of the log, a row for each frame. Texts are yet to be validated."""
    with ThreadPoolExecutor(THREADS) as threads:  # numpy gathers without holding the interpreter up
        framed = framed_files(directory, payloads.STEM, payloads.SCHEMA_HASH)
        yield from threads.map(_table, framed)


def _table(framed: Framed) -> Any:
    return _Reader(framed).table()


def as_array(values: npt.NDArray[Any]) -> Any:
    """Without Arrow's look for pandas, whose import takes longer than all the rest."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class _Reader:
    def __init__(self, framed: Framed) -> None:
        self._framed = framed
        self._views = {form: np.frombuffer(framed.data, form, len(framed.data) >> s) for form, s in SHIFTS.items()}

    def table(self) -> Any:
        starts, ends = self._framed.starts, self._framed.ends
        try:
            parts = [self._rows(starts[i : i + ROWS], ends[i : i + ROWS]) for i in range(0, len(starts), ROWS)]
            found = (np.concatenate(column) for column in zip(*parts, strict=True))
            columns = [self._column(kind, values) for kind, values in zip(SCHEMA.types[1:], found, strict=True)]
        except IndexError as error:
            raise self._framed.damaged(error) from None
        sequence = np.arange(self._framed.first, self._framed.first + len(starts))
        return pa.Table.from_arrays([as_array(sequence), *columns], schema=SCHEMA)

    def _rows(self, starts: Positions, ends: Positions) -> list[npt.NDArray[Any]]:
        """The numbers of each column, or the views of its texts or lists."""
        place = starts + START + self._at("<i4", starts + 4)
        found: list[npt.NDArray[Any]] = []
        for kind in COLUMNS.values():
            if kind in FORMS:
                found.append(self._at(FORMS[kind], place))
                place = place + 8
                continue
            lengths = self._lengths(place)
            place = place + 8
            if kind == TEXT:
                found.append(self._texts(place, lengths))
                place = place + (lengths + 7 & ~7)
            else:
                found.append(np.stack([place >> 2, lengths], axis=1).astype(np.int32))
                place = place + (4 * lengths + 7 & ~7)
        return [*found, self._parts(place, ends), found[-1]]

    def _parts(self, place: Positions, ends: Positions) -> Positions:
        """One text more in the rows that do not end here; the others have an empty one."""
        found = np.zeros((len(place), 2), np.int64)
        (longer,) = np.nonzero(place < ends)
        if len(longer):
            lengths = self._lengths(place[longer])
            found[longer] = self._texts(place[longer] + 8, lengths)
            place[longer] += 8 + (lengths + 7 & ~7)
        if np.any(place != ends):
            raise IndexError("a row does not end with its frame")
        return found

    def _lengths(self, place: Positions) -> Positions:
        bounds = self._at("<i8", place)  # two numbers of four bytes: where it begins and ends
        lengths = bounds >> 32
        if np.any(bounds & 0xFFFFFFFF) or np.any(lengths < 0):
            raise IndexError("a row does not begin its buffer")
        return lengths

    def _at(self, form: str, places: Positions) -> npt.NDArray[Any]:
        return self._views[form][places >> SHIFTS[form]]

    def _texts(self, starts: Positions, lengths: Positions) -> Positions:
        """Arrow's views of two words: the length and four bytes; then eight more, or a zero and a long text's place."""
        kept = np.minimum(lengths, INLINE)
        first, last = self._at("<i8", starts), self._at("<i4", starts + 8).astype(np.int64)
        head = (first << 32) & HEAD_MASKS[kept] | lengths
        tail = (first >> 32 & 0xFFFFFFFF | last << 32) & TAIL_MASKS[kept]
        return np.stack([head, np.where(lengths > INLINE, starts << 32, tail)], axis=1)

    def _column(self, kind: Any, values: npt.NDArray[Any]) -> Any:
        whole = pa.py_buffer(self._framed.data)
        if kind in FORMS:
            return as_array(values)
        if kind == pa.string_view():
            return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values), whole])
        items = pa.Array.from_buffers(kind.value_type, len(whole) >> 2, [None, whole])
        starts, lengths = (as_array(np.ascontiguousarray(values[:, i])) for i in (0, 1))
        return pa.ListViewArray.from_arrays(starts, lengths, items)
