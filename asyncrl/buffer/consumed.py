"""Which groups were trained on, in a size that does not grow with the age of a run.

Groups come about in the order of their ids, and each dropped one leaves a hole, so that ranges of ids grow in number.
Only the newest ranges are kept as they are; of the ids before them there are a count and a digest. With the journal,
which tells what was delivered, that proves as much as the ids would.
"""

from bisect import bisect_right
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

Ranges = tuple[tuple[int, int], ...]
"""Of ids, inclusive, in order."""
KEPT = 2048
"""Ranges that stay: far more groups than can be under way at a time."""
MASK = (1 << 64) - 1


class EarlierGroups(msgspec.Struct, frozen=True):
    """Of the groups before those that are named."""

    below: int = 0
    """Smaller than every id that is named."""
    groups: int = 0
    digest: int = 0
    """A sum of hashes: the order of the ids does not matter."""

    @classmethod
    def of(cls, ids: Iterable[int], below: int) -> "EarlierGroups":
        return cls(below).plus(ids)

    def plus(self, ids: Iterable[int]) -> "EarlierGroups":
        groups, digest = self.groups, self.digest
        for number in ids:
            groups += 1
            digest += int.from_bytes(blake2b(number.to_bytes(8, "little"), digest_size=8).digest(), "little")
        return EarlierGroups(self.below, groups, digest & MASK)


class ConsumedGroups:
    """Ids are added one by one; one that is added twice is an error, for it would have been trained on twice."""

    def __init__(self, ranges: Ranges = (), earlier: EarlierGroups | None = None, *, kept: int = KEPT) -> None:
        self._first = [first for first, _ in ranges]
        self._last = [last for _, last in ranges]
        self._earlier, self._kept = earlier or EarlierGroups(), kept

    @property
    def ranges(self) -> Ranges:
        return tuple(zip(self._first, self._last, strict=True))

    @property
    def earlier(self) -> EarlierGroups | None:
        return self._earlier if self._earlier.groups else None

    def update(self, ids: Iterable[int]) -> "ConsumedGroups":
        for number in ids:
            self._add(number)
        if len(self._first) > 2 * self._kept:  # not for each id: to cut the beginning moves all else
            self._fold(len(self._first) - self._kept)
        return self

    def _add(self, number: int) -> None:
        if number < self._earlier.below:
            self._earlier = self._earlier.plus((number,))
            return
        after = bisect_right(self._first, number)
        before = after - 1
        if before >= 0 and number <= self._last[before]:
            raise ValueError(f"group {number} was consumed twice")
        follows = before >= 0 and self._last[before] == number - 1
        precedes = after < len(self._first) and self._first[after] == number + 1
        if follows and precedes:
            del self._last[before], self._first[after]
        elif follows:
            self._last[before] = number
        elif precedes:
            self._first[after] = number
        else:
            self._first.insert(after, number)
            self._last.insert(after, number)

    def _fold(self, count: int) -> None:
        old = (number for first, last in self.ranges[:count] for number in range(first, last + 1))
        found = self._earlier.plus(old)
        self._earlier = EarlierGroups(self._first[count], found.groups, found.digest)
        del self._first[:count], self._last[:count]
