"""The rows of metrics.parquet: one for each step, converted once, in memory as Arrow columns.

The file is replaced as a whole, because a Parquet file that grows cannot be read meanwhile. What takes long is to turn
Python objects into columns, so that is done for each row once.
"""

import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast, overload

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from asyncrl.data.untrusted import read_table
from asyncrl.errors import CorruptSegmentError
from asyncrl.system.run_directory import replace

pa, pc, pq = cast(Any, pyarrow), cast(Any, pyarrow.compute), cast(Any, pyarrow.parquet)  # their stubs are incomplete

Row = dict[str, Any]
CHUNK = 256
"""Rows that are converted together."""
ENGINE_ROWS = 20
"""Newest rows that keep figures per engine: in all rows, those of 64 engines would take longer to write than all
else."""


class MetricsRows(Sequence[Row]):
    """All rows, of which the newest are still Python objects."""

    def __init__(self, path: Path, before: int) -> None:
        """With the recorded rows of the steps before `before`."""
        self._path = path
        self._chunks: list[Any] = []
        self._newest: list[Row] = []
        self.damaged = ""
        """What is wrong with the recorded rows, which were set aside."""
        if path.exists():
            try:
                table = read_table(path)
                self._chunks = [table.filter(pc.less(table["step"], before))]
            except (CorruptSegmentError, KeyError) as error:
                aside = path.with_name(f"damaged-{path.name}")
                path.rename(aside)
                self.damaged = f"{error}; it is {aside.name} now, and the rows begin again with step {before + 1}"
        self._converted = sum(map(len, self._chunks))
        self._writing = threading.Lock()

    def append(self, row: Row) -> None:
        self._newest.append(row)
        if len(self._newest) > ENGINE_ROWS:
            self._newest[-ENGINE_ROWS - 1]["engines"] = None
        if len(self._newest) >= CHUNK + ENGINE_ROWS:
            self._chunks.append(_columns(self._newest[:CHUNK]))
            self._converted += CHUNK
            self._newest = self._newest[CHUNK:]

    def write(self) -> None:
        """In a thread, while nothing is appended; one whose caller was cancelled may still be at it."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if self:
            newest = [_columns(self._newest)] if self._newest else []
            table = pa.concat_tables([*self._chunks, *newest], promote_options="permissive")
            sink = io.BytesIO()
            # Numbers that are rarely the same twice: dictionaries and statistics take longer than all else.
            options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
            pq.write_table(table, sink, write_page_checksum=True, **options)
            replace(self._path, sink.getvalue())

    def __len__(self) -> int:
        return self._converted + len(self._newest)

    def __iter__(self) -> Iterator[Row]:
        for chunk in self._chunks:
            yield from chunk.to_pylist()
        yield from self._newest

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index] - self._converted
        if place >= 0:
            return self._newest[place]
        for chunk in reversed(self._chunks):
            place += len(chunk)
            if place >= 0:
                return chunk.slice(place, 1).to_pylist()[0]
        raise IndexError(index)


def _columns(rows: Sequence[Row]) -> Any:
    names = dict.fromkeys(name for row in rows for name in row)  # some figures are not in every step
    return pa.table({name: [row.get(name) for row in rows] for name in names})
