"""Which pages of the KV cache each row holds: pure bookkeeping, without a device.

A page holds the keys and values of PAGE consecutive tokens in all layers. Rows with the same prompt share its full
pages by reference count. The last, partly filled page is copied instead, because each row goes on writing into its
own; so no page that two rows hold is ever written again.

Every change is all or nothing: where pages are short the answer is False or None, and nothing has changed.

A free page keeps what it holds until it is needed, the one that was freed first before the others. So the next turn of
a conversation, or another prompt with the same beginning, finds full pages by their content: the digest of all tokens
up to a page's end. That is as vLLM does it.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from asyncrl.engines.native.sampling import Column

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
        self._free = dict.fromkeys(range(pages))
        """In the order in which they are used again."""
        self._by_content: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def reserve(self, row: int, length: int) -> bool:
        """Give a row pages for its first `length` tokens."""
        missing = pages_of(length, self.page) - int(self.held[row])
        if missing > len(self._free):
            return False
        self._give(row, [self._take() for _ in range(missing)])
        return True

    def share(self, source: int, target: int, length: int) -> list[Copy] | None:
        """Give an empty row the first `length` tokens of another; returns the copies that are still to be made."""
        assert self.held[target] == 0, f"row {target} holds {self.held[target]} pages"
        full, rest = divmod(length, self.page)
        if rest and not self._free:
            return None
        copies = [Copy(int(self.table[source, full]), self._take())] if rest else []
        self._give(target, self.table[source, :full].tolist() + [copy.target for copy in copies])
        return copies

    def release(self, row: int) -> None:
        """The last page is free first: without those before it, it is of no use."""
        for page in self.table[row, : self.held[row]].tolist()[::-1]:
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
        self.held[row] = 0

    def remember(self, row: int, tokens: Column) -> None:
        """A row has written the keys and values of these first tokens of it."""
        for page, content in zip(self.table[row, : self.held[row]].tolist(), self._digests(tokens), strict=False):
            if content not in self._by_content:
                self._forget(page)
                self._by_content[content], self._contents[page] = page, content

    def find(self, row: int, tokens: Column) -> int:
        """Give an empty row the pages that hold the beginning of these tokens; returns how many tokens that is."""
        assert self.held[row] == 0, f"row {row} holds {self.held[row]} pages"
        found = list[int]()
        for content in self._digests(tokens):
            if (page := self._by_content.get(content)) is None:
                break
            found.append(page)
        for page in found:
            self._free.pop(page, None)
        self._give(row, found)
        return len(found) * self.page

    def forget(self) -> None:
        """What pages hold is of no use to others any more."""
        self._by_content.clear()
        self._contents.clear()

    def move(self, source: int, target: int) -> None:
        """Give all pages of a row to another one, which holds none."""
        assert self.held[target] == 0, f"row {target} holds {self.held[target]} pages"
        count = self.held[target] = self.held[source]
        self.table[target, :count] = self.table[source, :count]
        self.held[source] = 0

    def _take(self) -> int:
        page = next(iter(self._free))
        del self._free[page]
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        if (content := self._contents.pop(page, None)) is not None:
            del self._by_content[content]

    def _digests(self, tokens: Column) -> Iterator[bytes]:
        """Of the tokens up to the end of each full page."""
        digest = blake2b(digest_size=16)
        for begin in range(0, len(tokens) - self.page + 1, self.page):
            digest.update(np.ascontiguousarray(tokens[begin : begin + self.page], np.int64).tobytes())
            yield digest.digest()

    def _give(self, row: int, pages: list[int]) -> None:
        held = int(self.held[row])
        self.held[row] = end = held + len(pages)
        self.table[row, held:end] = pages
        for page in pages:
            self._users[page] += 1


def pages_of(length: int, page: int = PAGE) -> int:
    return -(-length // page)
