"""Collectives on links of round numbers, computed by hand; and what must hold for any."""

from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.simulation.collectives import Links
from asyncrl.simulation.hardware import H100, Reached

NODE = Links(node=4, inside=100.0, between=10.0, hop_inside=0.0, hop_between=0.0)
"""A node of 4 has 100 bytes a second to each neighbour, and 10 of each rank to other nodes."""
HOPS = NODE._replace(inside=1e30, between=1e30, hop_inside=1.0, hop_between=100.0)


def test_links_are_the_reached_share_of_the_hardware() -> None:
    links = Links.of(H100(inside=400.0, between=50.0), Reached(network=0.5))
    assert (links.node, links.inside, links.between) == (8, 200.0, 25.0)


def test_a_gather_brings_what_others_have() -> None:
    assert isclose(NODE.gather(800, 2), 400 / 100)
    assert isclose(NODE.gather(800, 4), 600 / 100)
    # Each of two nodes gets the other's 400 bytes through four cards; inside, a rank gets 700 of 800 bytes.
    assert isclose(NODE.gather(800, 8), max(700 / 100, 400 / 40))
    # With one rank in each node nothing passes inside, and there is one card.
    assert isclose(NODE.gather(800, 2, stride=4), 400 / 10)
    assert isclose(NODE.gather(800, 4, stride=2), max(600 / 100, 400 / 20))


def test_a_ring_has_as_many_hops_as_ranks_less_one() -> None:
    assert HOPS.gather(1, 4) == 3
    assert HOPS.gather(1, 8) == 6 + 100
    assert HOPS.gather(1, 8, stride=4) == 7 * 100


def test_a_sum_is_two_gathers_over_direct_links_and_a_tree() -> None:
    assert isclose(NODE.reduce(800, 4), 2 * 600 / 100)
    assert isclose(NODE.reduce(800, 8), max(2 * 700 / 100, 2 * 400 / 40))
    assert HOPS.reduce(1, 4) == 2
    assert HOPS.reduce(1, 16) == 2 + 2 * 2 * 100


def test_an_exchange_sends_each_rank_its_part() -> None:
    assert isclose(NODE.exchange(800, 4), 600 / 100)
    # An eighth for each: three of them inside, four to the other node through the own card.
    assert isclose(NODE.exchange(800, 8), max(300 / 100, 400 / 10))
    assert (HOPS.exchange(1, 4), HOPS.exchange(1, 8)) == (1, 101)


def test_a_broadcast_is_limited_by_the_sender() -> None:
    assert isclose(NODE.send(800, 3, gpus=4), 8)
    assert isclose(NODE.send(800, 4, gpus=8), 80)
    assert HOPS.send(1, 3, gpus=4) == 3
    assert HOPS.send(1, 4, gpus=8) == 3 + 100


LINKS = st.builds(
    Links,
    node=st.sampled_from([1, 4, 8]),
    inside=st.floats(1, 1e12),
    between=st.floats(1, 1e12),
    hop_inside=st.floats(0, 1e-3),
    hop_between=st.floats(0, 1e-3),
)
SIZES = st.floats(0, 1e12)
RANKS = st.sampled_from([1, 2, 3, 8, 12, 64, 1000])


def all_of(links: Links, size: float, ranks: int) -> list[float]:
    every = [links.gather(size, ranks), links.gather(size, ranks, stride=4), links.reduce(size, ranks)]
    return [*every, links.exchange(size, ranks)]


@given(LINKS, SIZES)
def test_one_rank_costs_nothing(links: Links, size: float) -> None:
    assert all_of(links, size, 1) == [0, 0, 0, 0]


@given(LINKS, SIZES, RANKS, st.floats(1, 10))
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(
    links: Links, size: float, ranks: int, times: float
) -> None:
    faster = links._replace(inside=links.inside * times, between=links.between * times)
    for found, better, longer in zip(
        all_of(links, size, ranks), all_of(faster, size, ranks), all_of(links, size * times, ranks), strict=True
    ):
        assert 0 <= better <= found <= longer
    assert faster.send(size, ranks, 2 * ranks) <= links.send(size, ranks, 2 * ranks)


@given(LINKS, SIZES, st.sampled_from([2, 8, 64]))
def test_more_nodes_are_never_faster(links: Links, size: float, ranks: int) -> None:
    assert links.gather(size, ranks) <= links.gather(size, 2 * ranks) * (1 + 1e-9)
    assert links.reduce(size, ranks) <= links.reduce(size, 2 * ranks) * (1 + 1e-9)
