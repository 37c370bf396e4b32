"""Attention heads over ranks that share a batch, whether they divide or not."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.models.head_shares import HeadShare, head_shares, most_heads


def test_shares_by_hand() -> None:
    assert head_shares(8, 2, 4) == [
        HeadShare(slice(0, 2), slice(0, 1), (1,)),
        HeadShare(slice(2, 4), slice(0, 1), (1,)),
        HeadShare(slice(4, 6), slice(1, 2), (1,)),
        HeadShare(slice(6, 8), slice(1, 2), (1,)),
    ]
    # SmolLM2-135M: the first rank has three queries of the first key and one of the second, so that each has its own.
    assert head_shares(9, 3, 2) == [
        HeadShare(slice(0, 4), slice(0, 2), (3, 1)),
        HeadShare(slice(4, 9), slice(1, 3), (2, 3)),
    ]
    assert most_heads(9, 3, 2) == (5, 5)
    # Five and two queries of two keys, three and five: nothing divides both.
    assert head_shares(15, 3, 2) == [
        HeadShare(slice(0, 7), slice(0, 2), (5, 2)),
        HeadShare(slice(7, 15), slice(1, 3), (3, 5)),
    ]
    assert head_shares(12, 2, 3)[1] == HeadShare(slice(4, 8), slice(0, 2), (1, 1))
    assert head_shares(1, 1, 2) == [HeadShare(slice(0, 0), slice(0, 0), ()), HeadShare(slice(0, 1), slice(0, 1), (1,))]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 70))
def test_every_query_is_somewhere_and_reads_its_own_key(kv_heads: int, readers: int, ranks: int) -> None:
    heads = kv_heads * readers
    shares = head_shares(heads, kv_heads, ranks)
    found: list[int] = []
    for share in shares:
        keys = range(kv_heads)[share.keys]
        given_keys = [key for key, copies in zip(keys, share.copies, strict=True) for _ in range(copies)]
        found += [key for key in given_keys for _ in range(share.num_queries // len(given_keys))]
    assert found == [query // readers for query in range(heads)]
    numbers = [share.num_queries for share in shares]
    assert max(numbers) - min(numbers) <= 1
