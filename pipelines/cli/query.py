"""`asyncrl query RUN SQL`: query a run's tables, during the run or after it.

The table is drawn here and not by rich, which takes 4 s for a thousand rows of 13 columns where this takes 0.04 s.
"""

import csv
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

import msgspec

from asyncrl.buffer.retention import read_pruned
from asyncrl.config.errors import did_you_mean
from asyncrl.errors import ConfigError
from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import TABLES, open_run
from asyncrl.system.run_directory import RunDirectory

if TYPE_CHECKING:
    import duckdb

NARROWEST = 6
"""Characters of a column, however many there are."""
Cells = Sequence[str]
SHOWN = 1000
"""Rows that a table on the terminal holds; csv and json have all."""
FETCHED = 10_000
PIPED = 240
"""Columns of a table that goes into a pipe or a file."""
CELL = 60
"""Characters of a list or text in a table's cell."""
Row = tuple[Any, ...]


def query(run: Path, sql: str | None, format: str = "table") -> None:
    """Print the result as `table`, `csv` or `json`; without SQL, what can be queried. `sql` may name a ready query."""
    connection = open_run(run)
    if pruned := read_pruned(RunDirectory(run).trajectories):
        print(pruned, file=sys.stderr)
    try:
        if sql is None:
            _show_tables(connection)
            return
        names, rows = _execute(connection, _ready(sql))
        match format:
            case "csv":
                _write_csv(names, rows)
            case "json":
                _write_json(names, rows)
            case _:
                _show(names, rows)
    except BrokenPipeError:  # the reader closed the pipe; without this the interpreter would flush once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        connection.close()


def _width() -> int:
    """Of the terminal; wide enough for most tables where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED


def _ready(sql: str) -> str:
    if not re.fullmatch(r"\s*\w+\s*", sql):
        return sql
    name = sql.strip()
    if name in TABLES:
        return f"FROM {name}"
    if name not in READY:
        raise ConfigError(f"{name!r} is no ready query and no table; {did_you_mean(name, [*READY, *TABLES])}")
    return READY[name].sql


def _execute(connection: "duckdb.DuckDBPyConnection", sql: str) -> tuple[list[str], Iterator[Row]]:
    import duckdb

    try:
        cursor = connection.execute(sql)
        names = [column[0] for column in cursor.description or ()]
        first = cursor.fetchmany(FETCHED)
    except duckdb.Error as error:
        raise ConfigError(f"{_sentence(error)}; tables: {', '.join(TABLES)}; `asyncrl query RUN` shows them") from None

    def rows() -> Iterator[Row]:
        fetched = first
        while fetched:
            yield from fetched
            fetched = cursor.fetchmany(FETCHED)

    return names, rows()


def _sentence(error: Exception) -> str:
    """What DuckDB says, without its excerpt of the query."""
    message = re.split(r"\n\s*LINE \d+:", str(error), maxsplit=1)[0]
    return " ".join(message.split()).rstrip("!.;")


def _show_tables(connection: "duckdb.DuckDBPyConnection") -> None:
    for name, says in TABLES.items():
        columns = connection.execute(f"DESCRIBE {name}").fetchall()  # a name of our own
        _say(f"{name}: {says}")
        _say("  " + ", ".join(f"{column} {kind}" for column, kind, *_ in columns))
        print()
    _say("tokens(group_id, sample): position, token, version, logprob of one trajectory")
    print()
    _say("ready queries, to be given by name:")
    for name, ready in READY.items():
        _say(f"  {name:<22} {ready.says}")


def _say(text: str) -> None:
    print(textwrap.fill(text, _width()))


def _show(names: list[str], rows: Iterator[Row]) -> None:
    shown = [[_cell(value) for value in row] for row in islice(rows, SHOWN)]
    for line in draw([_cell(name) for name in names], shown, _width()):
        print(line)
    if next(rows, None) is not None:
        print(f"the first {SHOWN} rows; --format csv or json has all")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    text = text[: CELL + 1]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= CELL else f"{text[: CELL - 3]}..."


def draw(names: Cells, rows: Sequence[Cells], width: int) -> Iterator[str]:
    """The lines of a table. Columns get narrower, the widest first, until it fits; long cells are folded."""
    columns = zip(names, *rows, strict=True)
    widths = _fit([max(map(_display_width, column)) for column in columns], width - 3 * len(names) - 1)
    yield _rule("┏━┳┓", widths)
    yield from _row("┃", names, widths)
    yield _rule("┡━╇┩", widths)
    for row in rows:
        yield from _row("│", row, widths)
    yield _rule("└─┴┘", widths)


def _fit(widths: Sequence[int], room: int) -> list[int]:
    most = max(widths, default=0)
    while most > NARROWEST and sum(min(width, most) for width in widths) > room:
        most -= 1
    return [min(width, most) for width in widths]


def _rule(letters: str, widths: Sequence[int]) -> str:
    left, line, cross, right = letters
    return left + cross.join(line * (width + 2) for width in widths) + right


def _row(bar: str, cells: Cells, widths: Sequence[int]) -> Iterator[str]:
    folded = [_fold(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        padded = [part + " " * (width - _display_width(part)) for part, width in zip(parts, widths, strict=True)]
        yield f"{bar} {f' {bar} '.join(padded)} {bar}"


def _fold(cell: str, width: int) -> list[str]:
    if _display_width(cell) <= width:
        return [cell]
    letters = width if cell.isascii() else width // 2  # each of the others may be two columns wide
    return [cell[i : i + letters] for i in range(0, len(cell), letters)]


def _display_width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _write_csv(names: list[str], rows: Iterator[Row]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)


def _write_json(names: list[str], rows: Iterator[Row]) -> None:
    """One object a line, so that a million of them can be read as they come."""
    encode = msgspec.json.Encoder(enc_hook=str).encode
    for row in rows:
        print(encode(dict(zip(names, row, strict=True))).decode())
