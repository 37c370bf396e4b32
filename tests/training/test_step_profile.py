"""How much of what travels between ranks is hidden behind computing, and the trace that says so."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.step_profile import Overlap, StepProfile

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: (min(ends), max(ends))))


@pytest.mark.parametrize(
    ("travel", "work", "found"),
    [
        ([(0, 4)], [(1, 2), (3, 6)], (4, 2)),
        ([(0, 4), (2, 6)], [(5, 7)], (6, 1)),
        ([(0, 2), (4, 6)], [(2, 4)], (4, 0)),
        ([], [(0, 9)], (0, 0)),
    ],
    ids=["two at once", "each moment once", "one after the other", "one rank"],
)
def test_moments_count_once(travel: list[tuple[int, int]], work: list[tuple[int, int]], found: tuple[int, int]) -> None:
    assert Overlap.of(travel, work) == found


@given(spans, spans)
def test_moments_are_those_of_a_clock(travel: list[tuple[int, int]], work: list[tuple[int, int]]) -> None:
    def busy(spans: list[tuple[int, int]]) -> set[int]:
        return {moment for begin, end in spans for moment in range(begin, end)}

    assert Overlap.of(travel, work) == (len(busy(travel)), len(busy(travel) & busy(work)))


def test_a_step_is_written_for_perfetto(tmp_path: Path) -> None:
    profile = StepProfile(tmp_path / "profile" / "step-1-rank-0.json.gz", torch.device("cpu"))
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert profile.end() == Overlap(0.0, 0.0), "nothing travels"
    trace = json.loads(gzip.decompress(profile.path.read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
