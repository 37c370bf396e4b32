"""A table of text that looks like those of rich, which take half a second for a thousand rows."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from unicodedata import combining, east_asian_width

NARROWEST = 6
"""Letters of a column, however many there are."""
Cells = Sequence[str]


def draw(names: Cells, rows: Sequence[Cells], width: int) -> Iterator[str]:
    """Its lines. Columns get narrower, the widest first, until it fits; what does not fit in a cell is folded."""
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
