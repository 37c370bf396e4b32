"""Neighbouring ranks are on one machine, as far as Ray's placement lets them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.resources import by_machine


def test_members_are_ordered_machine_by_machine() -> None:
    assert by_machine({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3], "the machine of the first bundle first"
    assert by_machine({3: "a", 1: "a", 2: "a", 0: "a"}) == [0, 1, 2, 3]


@given(st.lists(st.sampled_from("abc"), min_size=1))
def test_every_machine_is_one_run(machines: list[str]) -> None:
    order = by_machine(dict(enumerate(machines)))
    assert sorted(order) == list(range(len(machines)))
    placed = [machines[bundle] for bundle in order]
    changes = sum(one != other for one, other in pairwise(placed))
    assert changes == len(set(machines)) - 1
