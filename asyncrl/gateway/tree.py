"""The tokens of an episode as a tree, each of them once, in the order in which they came.

A token goes on from the one before it, except where a branch starts. A position is the index of a token; -1 stands
before the first one. Nothing here costs more than the tokens that are looked at: a call that continues a line looks at
its own.
"""

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

import numpy as np

from asyncrl.types import Ints

NOTHING = -1
"""The position before the first token."""


class Match(NamedTuple):
    position: int
    """Of the last token that is in the tree already."""
    tokens: int
    """So many are."""


class TokenTree:
    def __init__(self) -> None:
        self._tokens = np.empty(1024, np.int32)
        self.size = 0
        self._starts: list[int] = []
        """Of the runs, which are what lies between two branches."""
        self._after: list[int] = []
        """The position that each run goes on from."""
        self._branches: dict[int, list[int]] = {}
        """Starts of the branches that go on from a position."""
        self._forks: list[int] = []
        """Those positions, in order."""

    def append(self, after: int, tokens: Ints) -> int:
        """Add tokens that go on from a position; the result is where they start."""
        start, stop = self.size, self.size + len(tokens)
        if stop > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[:start], np.empty(max(start, stop - start), np.int32)])
        self._tokens[start:stop] = tokens
        self.size = stop
        if after != start - 1 or not start:
            self._starts.append(start)
            self._after.append(after)
            if after not in self._branches:
                insort(self._forks, after)
            self._branches.setdefault(after, []).append(start)
        return start

    def tokens(self, start: int, stop: int) -> Ints:
        return self._tokens[start:stop]

    def path(self, position: int) -> Ints:
        """All tokens up to a position, as the model saw them."""
        parts = list[Ints]()
        while position != NOTHING:
            run = bisect_right(self._starts, position) - 1
            parts.append(self._tokens[self._starts[run] : position + 1])
            position = self._after[run]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def before(self, position: int) -> int:
        """The position that a token goes on from."""
        run = bisect_right(self._starts, position) - 1
        return self._after[run] if self._starts[run] == position else position - 1

    def goes_through(self, position: int, earlier: int) -> bool:
        """Whether the path to a position has another on it."""
        while position >= earlier:
            run = bisect_right(self._starts, position) - 1
            if self._starts[run] <= earlier:
                return True
            position = self._after[run]
        return False

    def match(self, base: int, tokens: Ints) -> Match:
        """How far the tree already holds `tokens`, going on from `base`. The same token can be there several times, of
        calls that were sampled in parallel; of equal matches the latest counts."""
        found = Match(base, 0)
        waiting = [found]
        while waiting:
            begin = waiting.pop()
            if begin.tokens == len(tokens):
                continue
            for start in self._next(begin.position, along=not begin.tokens):
                if self._tokens[start] != tokens[begin.tokens]:
                    continue
                stop = min(self._stop(start), start + len(tokens) - begin.tokens)
                same = _same(self._tokens[start:stop], tokens[begin.tokens :])
                end = Match(start + same - 1, begin.tokens + same)
                found = max(found, end, key=lambda match: (match.tokens, match.position))
                first, last = bisect_left(self._forks, start), bisect_right(self._forks, end.position)
                waiting += [Match(fork, begin.tokens + fork - start + 1) for fork in self._forks[first:last]]
        return found

    def first_after(self, position: int) -> int | None:
        """The earliest token that goes on from a position; None: nothing does."""
        return min(self._next(position, along=True), default=None)

    def _next(self, position: int, *, along: bool) -> list[int]:
        """Where tokens go on from a position: the branches and, if asked for, the next one along its run."""
        branches = self._branches.get(position, [])
        follows = along and position + 1 < self.size and position != NOTHING and not self._is_start(position + 1)
        return [position + 1, *branches] if follows else branches

    def _is_start(self, position: int) -> bool:
        index = bisect_left(self._starts, position)
        return index < len(self._starts) and self._starts[index] == position

    def _stop(self, position: int) -> int:
        """The end of the run that a position lies in."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else self.size


def _same(one: Ints, other: Ints) -> int:
    """Length of the common prefix; `one` is not the longer."""
    differs = np.flatnonzero(one != other[: len(one)])
    return int(differs[0]) if len(differs) else len(one)
