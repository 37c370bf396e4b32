"""Which pages of the KV cache each row holds: pure bookkeeping, without a device.

A page holds the keys and values of PAGE consecutive tokens in all layers. Rows with the same prompt share its full
pages by reference count. The last, partly filled page is copied instead, because each row goes on writing into its
own; so no page that two rows hold is ever written again.

Every change is all or nothing: where pages are short the answer is False or None, and nothing has changed.
"""

from typing import NamedTuple

import numpy as np

PAGE = 64


class Copy(NamedTuple):
    """A page whose contents are to be copied, and where to."""

    source: int
    target: int


class PageTable:
    def __init__(self, rows: int, length: int, pages: int, page: int = PAGE) -> None:
        self.page = page
        self.table = np.zeros((rows, pages_of(length, page)), np.int32)
        """The pages of each row, in order; what lies behind `held` is garbage."""
        self.held = np.zeros(rows, np.int64)
        self._users = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def reserve(self, row: int, length: int) -> bool:
        """Give a row pages for its first `length` tokens."""
        missing = pages_of(length, self.page) - int(self.held[row])
        if missing > len(self._free):
            return False
        self._give(row, [self._free.pop() for _ in range(missing)])
        return True

    def share(self, source: int, target: int, length: int) -> list[Copy] | None:
        """Give an empty row the first `length` tokens of another; returns the copies that are still to be made."""
        assert self.held[target] == 0, f"row {target} holds {self.held[target]} pages"
        full, rest = divmod(length, self.page)
        if rest and not self._free:
            return None
        copies = [Copy(int(self.table[source, full]), self._free.pop())] if rest else []
        self._give(target, self.table[source, :full].tolist() + [copy.target for copy in copies])
        return copies

    def release(self, row: int) -> None:
        for page in self.table[row, : self.held[row]].tolist():
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
        self.held[row] = 0

    def move(self, source: int, target: int) -> None:
        """Give all pages of a row to another one, which holds none."""
        assert self.held[target] == 0, f"row {target} holds {self.held[target]} pages"
        count = self.held[target] = self.held[source]
        self.table[target, :count] = self.table[source, :count]
        self.held[source] = 0

    def _give(self, row: int, pages: list[int]) -> None:
        held = int(self.held[row])
        self.held[row] = end = held + len(pages)
        self.table[row, held:end] = pages
        for page in pages:
            self._users[page] += 1


def pages_of(length: int, page: int = PAGE) -> int:
    return -(-length // page)
