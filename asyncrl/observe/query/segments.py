"""A trajectory log as Arrow columns, a file at a time: a million completions within a second.

Every trajectory is a record batch of its own, and to open a million of them one by one takes minutes. Here the fields
of all rows of a file are found together, with positions as arrays. They are not looked up in Arrow's metadata: buffers
follow one another in the order of the columns, each filled up to eight bytes, so the length of one tells where the next
begins. The last one must end where the frame ends, or the file is refused.

Texts and lists stay in the mapped file and are views into it: nobody touches tokens but the query that names them.
"""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow

from asyncrl.data.arrow import COLUMNS, FLOAT64, INT32, TEXT
from asyncrl.data.untrusted import START
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.query.logs import File, Positions, find_frames

pa = cast(Any, pyarrow)  # its type stubs are incomplete

MOST_BYTES = (1 << 31) - 1
"""Of a file that Arrow's views can reach into."""
ROWS = 1 << 16
"""Looked at together."""
WORD = 3
"""A shift: Arrow aligns everything to eight bytes, so places are counted in words of so many."""
NOT_BOUNDS = 0xFFFFFFFF - (1 << 63)
"""Bits that are 0 where a text or list begins at 0 and does not end before."""
NOT_ASCII, SHORT = 0x80808080_80808080 - (1 << 64), 16
"""Bits that are 0 in eight letters of ASCII, and words of a text that are looked at for them."""
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
        ("route_bytes", pa.int64()),
        ("episode", pa.string_view()),
        ("teacher_logprobs", pa.list_view(pa.float32())),
        ("teacher_top_k_bytes", pa.int64()),
        ("unsigned_versions", pa.list_view(pa.uint32())),
    ]
)
"""The last one is `versions` once more: where a token was given, -1 is the largest number, so that the least of all is
the oldest version that was sampled."""


def read_trajectories(file: File) -> Any:
    """A table with a row for each frame."""
    if len(file.data) > MOST_BYTES:
        raise CorruptSegmentError(f"{file.path} is longer than 2 GiB: lower buffer.segment_bytes")
    _, starts, ends = find_frames(file)
    reader = _Reader(file)
    try:
        batches = [reader.batch(i, starts[i : i + ROWS], ends[i : i + ROWS]) for i in range(0, len(starts), ROWS)]
    except (IndexError, pa.ArrowInvalid) as error:
        raise file.damaged(error) from None
    return pa.Table.from_batches(batches, SCHEMA)


def as_array(values: npt.NDArray[Any]) -> Any:
    """Without Arrow's look for pandas, whose import takes longer than all the rest."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class _Reader:
    """`place`: the word at which a column of each row begins. What reads a column says where the next one does."""

    def __init__(self, file: File) -> None:
        self._first = file.first
        self._words = np.frombuffer(file.data, "<i8", len(file.data) >> WORD)
        self._whole = pa.py_buffer(file.data)

    def batch(self, first: int, starts: Positions, ends: Positions) -> Any:
        columns = [as_array(np.arange(self._first + first, self._first + first + len(starts)))]
        metadata = self._words.take(starts >> WORD) >> 32
        if np.any(metadata < 0):
            raise IndexError("a row begins before its frame")
        place = starts + START + metadata >> WORD
        for kind in COLUMNS.values():
            column, place = self._column(kind, place)
            columns.append(column)
        versions = columns[-1]
        unsigned = pa.ListViewArray.from_arrays(versions.offsets, versions.sizes, versions.values.view(pa.uint32()))
        columns += [self._text(place, ends), self._num_bytes(place, ends), self._text(place, ends)]
        columns += [self._floats(place, ends), self._num_bytes(place, ends), unsigned]
        if np.any(place << WORD != ends):
            raise IndexError("a row does not end with its frame")
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _column(self, kind: Any, place: Positions) -> tuple[Any, Positions]:
        if kind == TEXT:
            views, place = self._texts(place)
            return self._as_text(views), place
        if pa.types.is_list(kind):
            return self._lists(kind.value_type, place)
        numbers = self._words.take(place)
        found = numbers.astype("<i4") if kind == INT32 else numbers.view("<f8") if kind == FLOAT64 else numbers
        return as_array(found), place + 1

    def _text(self, place: Positions, ends: Positions) -> Any:
        """One text more in the rows that do not end here; the others have an empty one."""
        views = np.zeros((len(place), 2), np.int64)
        (longer,) = np.nonzero(place << WORD < ends)
        if len(longer):
            views[longer], place[longer] = self._texts(place[longer])
        return self._as_text(views)

    def _num_bytes(self, place: Positions, ends: Positions) -> Any:
        """How long a column of bytes is, in the rows that do not end here; the others have none."""
        lengths = np.zeros(len(place), np.int64)
        (longer,) = np.nonzero(place << WORD < ends)
        if len(longer):
            lengths[longer] = self._lengths(place[longer])
            place[longer] += 1 + (lengths[longer] + 7 >> WORD)
        return as_array(lengths)

    def _floats(self, place: Positions, ends: Positions) -> Any:
        """Bytes that are float32, in the rows that do not end here; the others have none."""
        starts, sizes = np.zeros(len(place), "<i4"), np.zeros(len(place), "<i4")
        (longer,) = np.nonzero(place << WORD < ends)
        if len(longer):
            lengths = self._lengths(place[longer])
            starts[longer], sizes[longer] = place[longer] + 1 << 1, lengths >> 2
            place[longer] += 1 + (lengths + 7 >> WORD)
        items = pa.Array.from_buffers(pa.float32(), len(self._whole) >> 2, [None, self._whole])
        return pa.ListViewArray.from_arrays(as_array(starts), as_array(sizes), items)

    def _texts(self, place: Positions) -> tuple[Positions, Positions]:
        """Arrow's views of two words: the length and four bytes; then eight more, or a zero and a long text's place."""
        lengths, place = self._lengths(place), place + 1
        first = self._words.take(place)
        second = self._words.take(place + 1, mode="clip")  # the last text of a file may be of one word
        kept = np.minimum(lengths, INLINE)
        head = first << 32 & HEAD_MASKS.take(kept)
        tail = (first >> 32 & 0xFFFFFFFF | second << 32) & TAIL_MASKS.take(kept)
        views = np.empty((len(place), 2), np.int64)
        views[:, 0] = head | lengths
        views[:, 1] = np.where(lengths > INLINE, place << 32 + WORD, tail)
        words = lengths + 7 >> WORD
        if not (_are_ascii(head) and _are_ascii(tail) and self._continue_in_ascii(place, words)):
            self._as_text(views).validate(full=True)
        return views, place + words

    def _continue_in_ascii(self, place: Positions, words: Positions) -> bool:
        """Most texts do. Arrow takes several times as long to see that they are texts at all."""
        longest = int(words.max())
        found = (self._words.take(place[words > word] + word) for word in range(1, longest))
        return longest <= SHORT and all(map(_are_ascii, found))

    def _lists(self, kind: Any, place: Positions) -> tuple[Any, Positions]:
        """Of items of four bytes, which stay where they are."""
        lengths, place = self._lengths(place), place + 1
        items = pa.Array.from_buffers(kind, len(self._whole) >> 2, [None, self._whole])
        starts, sizes = (as_array(values.astype("<i4")) for values in (place << 1, lengths))
        return pa.ListViewArray.from_arrays(starts, sizes, items), place + (lengths + 1 >> 1)

    def _lengths(self, place: Positions) -> Positions:
        bounds = self._words.take(place)  # two numbers of four bytes: where it begins and ends
        if np.bitwise_or.reduce(bounds) & NOT_BOUNDS:
            raise IndexError("a row does not begin its buffer")
        return bounds >> 32

    def _as_text(self, views: Positions) -> Any:
        return pa.Array.from_buffers(pa.string_view(), len(views), [None, pa.py_buffer(views), self._whole])


def _are_ascii(letters: Positions) -> bool:
    return not np.bitwise_or.reduce(letters) & NOT_ASCII
