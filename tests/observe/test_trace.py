"""A trace is what viewers expect: every rule that they rely on, over a made run and over a long one."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.query.tables import open_run
from asyncrl.observe.trace import EVALUATES, FINISHED, PUBLISHES, RUN, TRAINER, TRAINS, Trace
from benchmarks.query import write_run
from pipelines.cli import main
from pipelines.cli.trace import write_trace
from tests.support.recorded_runs import empty_run, small_run

Event = dict[str, Any]
REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "tid", "args"},
}
"""Of the trace event format, by phase."""


def validate(events: Sequence[Event]) -> None:
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert isinstance(event["ts"], int), event
        assert event["ts"] >= 0, event
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    _check_names(events)
    _check_slices(events)
    _check_completions(events)
    _check_flows(events)
    assert all(isinstance(v, int | float) for e in events if e["ph"] == "C" for v in e["args"].values())
    assert all(event["s"] in ("g", "p", "t") for event in events if event["ph"] == "i")


def _check_names(events: Sequence[Event]) -> None:
    """Each row that something is drawn in has a name and a place."""
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for event in events:
        if event["ph"] not in ("M", "C"):
            for what, thread in (("process_name", 0), ("process_sort_index", 0), ("thread_name", event["tid"])):
                assert (what, event["pid"], thread) in named


def _slices(events: Sequence[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return rows


def _check_slices(events: Sequence[Event]) -> None:
    """Slices of one row follow one another: what overlaps without being nested is not drawn."""
    for spans in _slices(events).values():
        assert all(start < end for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def _check_completions(events: Sequence[Event]) -> None:
    begun: dict[tuple[str, str, int], int] = {}
    ended = 0
    for event in events:
        if event["ph"] in "be":
            key = event["cat"], event["id"], event["pid"]
            if event["ph"] == "b":
                assert key not in begun
                begun[key] = event["ts"]
            else:
                assert event["ts"] >= begun[key]
                ended += 1
    assert ended == len(begun)


def _check_flows(events: Sequence[Event]) -> None:
    """Each leaves from inside a slice, arrives inside a slice, and not before it left."""
    rows = _slices(events)
    starts: dict[str, int] = {}
    arrived: set[str] = set()
    for event in events:
        if event["ph"] in "sf":
            assert any(start <= event["ts"] <= end for start, end in rows[event["pid"], event["tid"]]), event
        if event["ph"] == "s":
            assert event["id"] not in starts
            starts[event["id"]] = event["ts"]
        if event["ph"] == "f":
            assert event["ts"] >= starts[event["id"]]
            arrived.add(event["id"])
    assert arrived == starts.keys()


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_small_run_by_hand(tmp_path: Path) -> None:
    trace = written(write_trace(small_run(tmp_path / "run"), None))
    events = trace["traceEvents"]
    validate(events)
    assert trace["otherData"] == {"left_out": ""}
    assert (tmp_path / "run" / "trace.json").stat().st_mode & 0o777 == 0o600
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert [each for each in slices if each[0] == TRAINER] == [
        (TRAINER, TRAINS, "wait_batch", 1_000_000, 1_500_000),
        (TRAINER, TRAINS, "train", 2_500_000, 500_000),
        (TRAINER, TRAINS, "train", 3_000_000, 500_000),
        (TRAINER, TRAINS, "update", 3_500_000, 250_000),
        (TRAINER, PUBLISHES, "publish", 3_750_000, 250_000),
        (TRAINER, EVALUATES, "evaluation", 4_000_000, 1_000_000),
        (TRAINER, TRAINS, "train", 9_500_000, 500_000),
    ]
    flows = {(e["id"], e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "f"}
    assert flows == {
        ("0/0", TRAINER, TRAINS, 2_500_000),
        ("0/1", TRAINER, TRAINS, 2_500_000),
        ("1/0", TRAINER, TRAINS, 3_000_000),
        ("1/1", TRAINER, TRAINS, 3_000_000),
        ("3/0", TRAINER, TRAINS, 9_500_000),
        ("3/1", TRAINER, TRAINS, 9_500_000),
    }
    assert [(e["name"], e["ts"], e["s"]) for e in events if e["ph"] == "i"] == [
        ("fleet_started", 0, "p"),
        ("version 1", 4_000_000, "g"),
        ("alarm", 5_000_000, "g"),
    ]
    assert {(e["name"], e["args"][e["name"]]) for e in events if e["ph"] == "C"} == {
        ("running", 2), ("buffered", 3), ("staleness_mean", 0.0), ("reward", 0.5),
    }  # fmt: skip
    begun = next(e for e in events if e["ph"] == "b" and e["id"] == "3/1")
    assert (begun["ts"], begun["args"]["answer_tokens"], begun["args"]["fate"]) == (6_000_000, 6, "training")
    finished = [(e["ts"], e["args"]["completions"]) for e in events if e["ph"] == "X" and e["tid"] == FINISHED != RUN
                and e["pid"] > TRAINER]  # fmt: skip
    assert finished == [(2_000_000, 2), (2_000_000, 2), (8_000_000, 1), (9_000_000, 1)]


def test_a_long_run_is_cut_at_its_beginning(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2_000)
    with open_run(tmp_path / "run") as connection:
        whole, newest = Trace(connection), Trace(connection, max_events=4_000)
        events = list(newest.events())
        validate(events)
        assert 2_000 < len([event for event in events if event["ph"] != "M"]) <= 4_000
        assert "the first" in newest.left_out
        assert not whole.left_out
        validate(list(whole.events()))


def test_before_the_first_step_there_is_an_empty_trace(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert write_trace(empty_run(tmp_path / "run").path, out) == out
    validate(written(out)["traceEvents"])


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    assert main(["trace", str(run), "--out", str(tmp_path / "nowhere" / "t.json")]) != 0
    assert "--out" in capsys.readouterr().err
