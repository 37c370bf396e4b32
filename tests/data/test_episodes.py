"""What a harness's trajectory has beside its tokens: on disk, checked, and as paths."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer import replay
from asyncrl.data.arrow import PLAYED, decode, encode, read_row, read_table
from asyncrl.data.episodes import Played, agent_figures, predicting_tree, tree
from asyncrl.data.episodes import played as sums
from asyncrl.types import GIVEN, Branch, Episode, Segment, Slot, Trajectory, Turn
from tests.support.buffer_stores import payload, trajectory
from tests.support.episodes import before, context, random_episode

seeds = st.integers(0, 2**32 - 1)


def played(seed: int) -> Trajectory:
    return random_episode(np.random.default_rng(seed), Slot(3, 1), turn_rewards=True)


@given(seeds, st.booleans())
def test_an_episode_comes_back_as_it_was_written(seed: int, parted: bool) -> None:
    item = msgspec.structs.replace(played(seed), parts={"format": 0.5} if parted else {})
    back = decode(encode(item))
    assert (back.episode, back.parts) == (item.episode, item.parts)
    for name in ("tokens", "versions", "logprobs"):
        assert np.array_equal(getattr(back, name), getattr(item, name))
    assert decode(encode(back)) == back


def test_only_rows_of_harnesses_have_the_column() -> None:
    item = played(1)
    assert pa.ipc.read_record_batch(pa.py_buffer(encode(item)), PLAYED).schema == PLAYED
    plain = trajectory(3, 1)
    assert len(encode(plain)) == len(encode(msgspec.structs.replace(plain, episode=None)))
    table = read_table([payload(0, 0), encode(item)])
    assert table.column("episode").to_pylist() == [None, msgspec.json.encode(item.episode).decode()]
    without = msgspec.structs.replace(item, episode=Episode(turns=item.episode.turns[:0]), segments=plain.segments[:1])
    assert decode(encode(without)).episode == Episode(), "an episode in which nothing was sampled is still one"


def test_an_episode_takes_few_bytes() -> None:
    line = Episode(turns=tuple(Turn(100 * turn, 100 * turn + 50, 0.0, 1) for turn in range(20)), model_s=1.0)
    assert len(msgspec.json.encode(line)) < 20 * 18 + 40


def _written(episode: Episode) -> bytes:
    """Four given tokens, three sampled, one given, one sampled."""
    segments = (Segment.given([1, 2, 3, 4]), Segment.sampled([5, 6, 7], [-1.0] * 3, 0))
    segments = (*segments, Segment.given([8]), Segment.sampled([9], [-1.0], 1))
    return encode(msgspec.structs.replace(played(0), segments=segments, episode=episode, parts={}))


TURNS = (Turn(4, 7), Turn(8, 9))


@pytest.mark.parametrize(
    ("episode", "complaint"),
    [
        (Episode(turns=TURNS, branches=(Branch(9, 1),)), "not one behind the other within its 9 tokens"),
        (Episode(turns=TURNS, branches=(Branch(0, -1),)), "not one behind the other"),
        (Episode(turns=TURNS, branches=(Branch(7, 1), Branch(7, 2))), "not one behind the other"),
        (Episode(turns=TURNS, branches=(Branch(7, 7),)), "goes on from 7, which is no token before it"),
        (Episode(turns=TURNS, branches=(Branch(7, -2),)), "goes on from -2"),
        (Episode(turns=TURNS, branches=(Branch(5, 2),)), "a branch begins at 5, inside the turn from 4 to 7"),
        (Episode(turns=TURNS, branches=(Branch(8, -1),)), "a token was sampled after nothing"),
        (Episode(turns=TURNS[::-1]), "turns begin and end at"),
        (Episode(turns=(Turn(4, 7), Turn(8, 10))), "turns begin and end at"),
        (Episode(turns=(Turn(-1, 7), Turn(8, 9))), "turns begin and end at"),
        (Episode(turns=(Turn(4, 6), Turn(8, 9))), "its turns are not its sampled tokens"),
        (Episode(turns=(Turn(3, 7), Turn(8, 9))), "its turns are not its sampled tokens"),
        (Episode(turns=(Turn(4, 7, float("nan")), Turn(8, 9))), "episode=.*Expected `float`"),
        (Episode(turns=TURNS, model_s=-1.0), "not negative"),
        (Episode(turns=(Turn(4, 7, tool_calls=-1), Turn(8, 9))), "tool calls and wasted tokens must be"),
        (Episode(turns=TURNS, wasted_tokens=2**40), "tool calls and wasted tokens must be"),
    ],
)
def test_episodes_that_do_not_fit_their_tokens_are_refused(episode: Episode, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_row(_written(episode))


def test_what_is_right_is_not_refused() -> None:
    good = Episode(turns=(Turn(4, 6), Turn(6, 7), Turn(8, 9)), branches=(Branch(6, 3, "parallel_call"), Branch(7, -1)))
    assert read_row(_written(good)).episode == good


@given(seeds, st.data())
def test_damaged_bytes_are_an_error_or_a_sound_episode(seed: int, data: st.DataObject) -> None:
    item = played(seed)
    written = msgspec.json.encode(item.episode)
    whole = bytearray(encode(item))
    place = bytes(whole).rindex(written) + data.draw(st.integers(0, len(written) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    try:
        back = decode(bytes(whole))
    except ValueError:
        return
    assert decode(encode(back)) == back


@given(seeds)
def test_paths_lead_to_every_end_and_share_what_they_have_in_common(seed: int) -> None:
    item = played(seed)
    found = tree(len(item.tokens), item.branches)
    assert found.before.tolist() == before(item)
    seen: set[int] = set()
    for places, shared in found.paths:
        *others, last = places.tolist()
        assert others == context(item, last)
        assert seen.issuperset(places[:shared].tolist())
        assert seen.isdisjoint(places[shared:].tolist())
        seen.update(places.tolist())
    assert seen == set(range(len(item.tokens)))
    ends = [path.places[-1] for path in found.paths]
    assert len(set(ends)) == len(ends)
    assert set(ends).isdisjoint(before(item))


@given(seeds)
def test_paths_for_prediction_end_where_something_was_sampled_next(seed: int) -> None:
    item = played(seed)
    sampled = item.versions != GIVEN
    found = predicting_tree(sampled, item.branches)
    seen = {place for path in found.paths for place in path.places.tolist()}
    assert seen == {place for token in np.flatnonzero(sampled) for place in context(item, int(token))}
    before_sampled = {before(item)[token] for token in np.flatnonzero(sampled)}
    assert all(path.places[-1] in before_sampled for path in found.paths)


def test_samples_are_compared_by_what_they_and_their_turns_earned() -> None:
    """1 + (2 + 0) / 2, and whose turns were not all worth the same."""
    turns = (Turn(4, 7, 2.0), Turn(8, 9, 0.0))
    sample = replay.check(_written(Episode(turns=turns)))
    assert (sample.reward, sample.uneven) == (played(0).reward + 1.0, True)
    assert not replay.check(_written(Episode(turns=TURNS))).uneven
    assert not replay.check(payload(0, 0)).uneven


def test_figures_of_a_step_are_the_same_however_it_was_delivered() -> None:
    items = [played(seed) for seed in range(5)]
    whole, parts = (
        agent_figures([sums(items)]),
        agent_figures([sums(items[:2]), sums([trajectory(0, 0)]), sums(items[2:])]),
    )
    assert whole == parts
    assert whole["agents"]["episodes"] == 5
    assert agent_figures([sums([trajectory(0, 0)])]) == {}
    assert "branches_by_cause" not in agent_figures([Played(episodes=1)])["agents"], "Parquet has no empty structure"
