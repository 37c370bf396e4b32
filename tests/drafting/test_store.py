"""Windows on their way: unchanged by transport, bounded in memory, and those that judge are never trained on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.drafting.store import HiddenStates
from asyncrl.drafting.windows import DTYPES, Window, decode, encode
from asyncrl.types import Slot
from tests.support.draft_windows import random_window


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_windows_come_back_as_they_were(dtype: torch.dtype) -> None:
    sent = [
        random_window("eagle3", 9, prompt=4, seed=3, slot=Slot(1 << 40, 7), version=12, start=100, answer_length=77),
        random_window("eagle", 1),
    ]
    sent = [Window(**_fields(w) | {"hidden_T_E": w.hidden_T_E.to(dtype), "taps_T_R": _as(w, dtype)}) for w in sent]
    for one, two in zip(sent, decode(encode(sent)), strict=True):
        for name, value in _fields(one).items():
            other = getattr(two, name)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_bytes_per_token_are_those_of_what_is_kept() -> None:
    # a token's id, its mark, 32 numbers of the final state and 64 tapped ones
    assert random_window("eagle3", 10).bytes_per_token == 4 + 1 + 4 * (32 + 64)
    assert random_window("eagle", 10, hidden_T_E=torch.zeros(10, 32).half()).bytes_per_token == 4 + 1 + 2 * 32


def test_a_damaged_payload_is_refused() -> None:
    payload = encode([random_window("eagle", 5)])
    with pytest.raises(ValueError, match="not a payload of windows"):
        decode(payload[: len(payload) // 2])
    with pytest.raises(ValueError, match="5 tokens, 4 marks"):
        decode(encode([random_window("eagle", 5, sampled_T=torch.ones(4, dtype=torch.bool))]))


def test_half_of_a_batch_is_long_answers_of_the_step_before() -> None:
    """Version 0 has answers of 1 to 100 tokens, version 1 so far only short ones."""
    store = HiddenStates(1 << 30, 0.0, seed=1)
    store.add(_window(group, version=0, answer_length=group + 1) for group in range(100))
    assert len({window.slot.group for window in store.batch(10 * 50)}) == 50, "without a step before, all the same"
    store.add(_window(100 + group, version=1, answer_length=3) for group in range(300))
    batch = store.batch(10 * 40)
    assert len(batch) == 40
    assert sum(window.version == 0 and window.answer_length > 75 for window in batch) >= 20
    assert len({window.slot.group for window in batch}) == 40, "each at most once"


def test_long_answers_of_the_step_before_are_dropped_last() -> None:
    size = _window(0).bytes
    store = HiddenStates(20 * size, 0.0)
    store.add(_window(group, version=0, answer_length=group) for group in range(20))
    store.add(_window(20 + group, version=1, answer_length=1) for group in range(60))
    held = {window.slot.group for window in store.batch(10**9)}
    assert held == set(range(15, 20)) | set(range(65, 80))
    counters = store.counters
    assert (counters.received, counters.dropped, counters.held) == (80, 60, 20)
    assert counters.held_bytes == 20 * size
    store.add([_window(90, version=2, answer_length=1), *(_window(91 + g, version=2) for g in range(19))])
    assert all(window.version for window in store.batch(10**9)), "two steps ago, they are like any other"


arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 30), st.integers(1, 90)), max_size=60
)


@given(arrivals=arrivals, room=st.integers(1, 40), share=st.floats(0.01, 1.0))
def test_never_above_its_bytes_and_never_trained_on_what_judges(
    arrivals: list[tuple[int, int, int, int]], room: int, share: float
) -> None:
    store = HiddenStates(room * _window(0).bytes, share)
    trained: set[int] = set()
    for group, version, length, answer_length in arrivals:
        store.add([_window(group, version=version, length=length, answer_length=answer_length)])
        assert store.counters.held_bytes <= room * _window(0).bytes
        trained |= {window.slot.group for window in store.batch(50)}
        assert trained.isdisjoint(window.slot.group for window in store.judges(10**9))
    counters, everything = store.counters, [*store.batch(10**9), *store.judges(10**9)]
    assert counters.received == len(arrivals) == counters.held + counters.dropped
    assert counters.held == len(everything)
    assert counters.held_tokens == sum(map(len, everything))
    assert counters.held_bytes == sum(window.bytes for window in everything)


def test_the_held_out_share_is_as_asked_and_the_same_everywhere() -> None:
    stores = [HiddenStates(1 << 30, 0.1, seed) for seed in (1, 2)]
    chosen = [[store.is_held_out(_window(group)) for group in range(2000)] for store in stores]
    assert chosen[0] == chosen[1]
    assert abs(sum(chosen[0]) - 200) < 4 * math.sqrt(2000 * 0.1 * 0.9)


def _window(group: int, *, version: int = 0, length: int = 10, answer_length: int = 5) -> Window:
    return Window(
        slot=Slot(group, 0),
        version=version,
        answer_length=answer_length,
        start=0,
        tokens_T=torch.zeros(length, dtype=torch.int32),
        sampled_T=torch.ones(length, dtype=torch.bool),
        hidden_T_E=torch.zeros(length, 4),
    )


def _fields(window: Window) -> dict[str, object]:
    return {name: getattr(window, name) for name in Window.__slots__}


def _as(window: Window, dtype: torch.dtype) -> torch.Tensor | None:
    return None if window.taps_T_R is None else window.taps_T_R.to(dtype)
