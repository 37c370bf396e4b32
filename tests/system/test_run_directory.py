"""Files of a run directory: rewritten ones are durable; events.jsonl stays below its bound and survives kills."""

import sys
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from asyncrl.observe.audit.records import check_events
from asyncrl.system.run_directory import Events, RunDirectory, read_events, replace


def test_the_file_is_bounded_and_keeps_what_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Events(path, max_bytes=4000)
    events.write("environment", found={"torch": "2"})
    most = 0
    for step in range(400):
        events.write("train", start=1.0, step=step)
        events.write("off_policy", step=step)
        if step % 100 == 0:
            events.write("evaluation", step=step)
        most = max(most, path.stat().st_size)
    events.close()
    found = read_events(path)
    assert most < 4200
    assert [event["step"] for event in found if event["kind"] == "evaluation"] == [0, 100, 200, 300]
    assert found[0]["kind"] == "environment"
    steps = [event["step"] for event in found if event["kind"] == "train"]
    assert steps == list(range(steps[0], 400)), "the newest ones, in order"
    written = 1 + 2 * 400 + 4
    gone = sum(event["lines"] for event in found if event["kind"] == "events_pruned")
    assert written - gone == sum(event["kind"] != "events_pruned" for event in found)
    assert check_events(path).torn == 0


def test_events_of_a_kind_are_found_without_decoding_the_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "train", "evaluation", "evaluation_2", "train", "evaluation")
    path.write_bytes(path.read_bytes() + b'{"kind":"train", 3}\n{"kind":"evalu')
    decoded: list[bytes] = []
    before = sys.getprofile()
    sys.setprofile(lambda _, event, call: decoded.append(b"") if call is msgspec.json.decode else None)
    try:
        found = read_events(path, "evaluation")
    finally:
        sys.setprofile(before)
    assert [event["kind"] for event in found] == ["evaluation"] * 2
    assert len(decoded) in (2, 4), "calls, perhaps with their returns"
    assert len(read_events(path)) == 5
    assert len(read_events(path, "evaluation", "train")) == 4


def test_what_is_told_once_is_bounded_too(tmp_path: Path) -> None:
    with closing(Events(tmp_path / "events.jsonl", max_bytes=2000)) as events:
        for number in range(300):
            events.write("alarm", text="x" * 50, number=number)
            assert (tmp_path / "events.jsonl").stat().st_size < 2200
    assert read_events(tmp_path / "events.jsonl")[-1]["number"] == 299


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_a_kill_tore_stands_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "first", "torn")
    path.write_bytes(path.read_bytes()[:-cut])
    write(path, "later")
    kinds = [event["kind"] for event in read_events(path)]
    assert kinds in (["first", "later"], ["first", "torn", "later"])
    assert check_events(path).torn == (len(kinds) == 2)


def write(path: Path, *kinds: str) -> None:
    with closing(Events(path, max_bytes=1 << 20)) as events:
        for kind in kinds:
            events.write(kind)


def test_a_replaced_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """A machine that loses its power in between must not leave an empty file. Of the calls only the order is seen."""
    calls: list[str] = []

    def see(_: FrameType, event: str, call: Any) -> None:
        if event == "c_call" and call.__module__ == "posix" and call.__name__ in ("fsync", "replace", "rename"):
            calls.append(call.__name__)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        replace(tmp_path / "config.yaml", b"steps: 1")
    finally:
        sys.setprofile(before)
    assert calls in (["fsync", "replace", "fsync"], ["fsync", "rename", "fsync"])


@pytest.mark.parametrize("content", [b"", b'{"status": "ok', b"\xff\xfe", b"3"])
def test_a_summary_that_cannot_be_read_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_summary() is None
    directory.summary.write_bytes(content)
    assert directory.read_summary() is None
    directory.summary.write_bytes(b'{"status": "ok"}')
    assert directory.read_summary() == {"status": "ok"}
