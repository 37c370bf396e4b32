"""Which groups were trained on: the same in whatever order they come, and never much to hold or to write."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.consumed import ConsumedGroups, EarlierGroups
from asyncrl.training.checkpoint_manifest import TrainingManifest


@given(ids=st.sets(st.integers(0, 60)).flatmap(lambda found: st.permutations(sorted(found))), kept=st.integers(1, 5))
def test_ranges_and_what_is_before_them_are_those_of_the_ids(ids: list[int], kept: int) -> None:
    found = ConsumedGroups(kept=kept)
    for number in ids:
        found.update([number])
    ranges = found.ranges
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(ranges))
    assert len(ranges) <= 2 * kept
    earlier = found.earlier or EarlierGroups()
    named = {number for first, last in ranges for number in range(first, last + 1)}
    assert named == {number for number in ids if number >= earlier.below}
    assert earlier == EarlierGroups.of(set(ids) - named, earlier.below)
    again = ConsumedGroups(found.ranges, found.earlier, kept=kept)
    for number in sorted(named)[:1]:
        with pytest.raises(ValueError, match=f"group {number} was consumed twice"):
            again.update([number])
    assert (again.update([99]).earlier or EarlierGroups()).groups >= earlier.groups


def test_holes_and_their_repeats_are_found() -> None:
    assert ConsumedGroups().update([3, 1, 2, 7]).ranges == ((1, 3), (7, 7))
    with pytest.raises(ValueError, match="group 2 was consumed twice"):
        ConsumedGroups().update([1, 2, 2])


def test_a_manifest_stays_small_however_many_groups_were_dropped() -> None:
    """With dynamic sampling every second group may be."""
    found, rng = ConsumedGroups(), random.Random(0)
    sizes: list[int] = []
    for step in range(3000):
        found.update(group for group in range(16 * step, 16 * step + 16) if rng.random() < 0.5)
        if step % 500 == 499:
            manifest = TrainingManifest(step=1, samples_trained=1, consumed=found.ranges, earlier=found.earlier)
            sizes.append(len(msgspec.json.encode(manifest)))
            assert msgspec.json.decode(msgspec.json.encode(manifest), type=TrainingManifest) == manifest
    assert max(sizes) < 80_000, sizes
