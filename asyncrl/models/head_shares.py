"""How attention heads are divided over ranks that share a batch; the numbers need not divide.

Each rank has a run of neighbouring query heads, as many as any other or one more, and the key/value heads that they
read. With more ranks than heads some have none. Nothing here needs torch.
"""

from itertools import pairwise
from math import gcd
from typing import NamedTuple


class HeadShare(NamedTuple):
    """One rank's."""

    queries: slice
    keys: slice
    """The key/value heads that its queries read."""
    copies: tuple[int, ...]
    """How often it has each of these, so that each copy is read by as many of its queries."""

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return len(self.copies)

    @property
    def num_sent(self) -> int:
        """Heads that others send to it: queries, keys and values."""
        return self.num_queries + 2 * self.num_keys


def head_shares(heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """Of every rank, in their order."""
    ends = [rank * heads // ranks for rank in range(ranks + 1)]
    return [_share(begin, end, heads // kv_heads) for begin, end in pairwise(ends)]


def _share(begin: int, end: int, readers: int) -> HeadShare:
    """`readers` is the number of query heads that read a key/value head in the whole model."""
    first, last = begin // readers, -(-end // readers)
    if begin == end:
        return HeadShare(slice(begin, end), slice(first, first), ())
    read = [min(end, (key + 1) * readers) - max(begin, key * readers) for key in range(first, last)]
    return HeadShare(slice(begin, end), slice(first, last), tuple(each // gcd(*read) for each in read))


def most_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query heads, and key/value heads with their copies, of the rank that has the most."""
    shares = head_shares(heads, kv_heads, ranks)
    return max(share.num_queries for share in shares), max(sum(share.copies) for share in shares)
