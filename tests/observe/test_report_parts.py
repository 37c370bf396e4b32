"""The parts of a report, against numbers worked out by hand."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import decoders, models

from asyncrl.observe.environment import environment
from asyncrl.observe.report import curves
from asyncrl.observe.report.recorded import differences, read
from asyncrl.observe.report.samples import samples, texts
from asyncrl.observe.report.time_breakdown import CAUSES, Judged, Running, split
from asyncrl.observe.report.waste import AGAIN_BY_TURNS
from asyncrl.system.processes import resident_bytes
from tests.support.recorded_runs import small_run
from tests.support.synthetic_runs import Scenario, write_run

NOTHING = Judged(np.array([]), np.array([]))


def span(kind: str, start: float, end: float) -> dict[str, Any]:
    return {"kind": kind, "time": start, "seconds": end - start}


def instant(kind: str, time: float) -> dict[str, Any]:
    return {"kind": kind, "time": time}


def test_the_loop_is_cut_by_cause() -> None:
    events = [
        instant("loop_started", 0.0), span("wait_batch", 0.0, 4.0), span("train", 4.0, 6.0), span("publish", 5.0, 8.0),
        span("evaluation", 8.0, 9.0), span("checkpoint", 9.0, 9.5), instant("loop_ended", 10.0),
        span("publish", 11.0, 12.0),
    ]  # fmt: skip
    # Ten completions until 1, one of them until 3, nobody until 4.
    running = Running.of(np.zeros(10), np.array([1.0] * 9 + [3.0]))
    found = split(events, running, NOTHING)
    assert [(float(s), float(e), CAUSES[c]) for s, e, c in zip(*found, strict=True)] == [
        (0.0, 1.0, "generation"), (1.0, 3.0, "tail"), (3.0, 4.0, "other"), (4.0, 6.0, "training"), (6.0, 8.0, "sync"),
        (9.0, 9.5, "checkpoint"), (9.5, 10.0, "other"),
    ]  # fmt: skip


def test_who_holds_most_of_the_samples_is_waited_for() -> None:
    events = [instant("loop_started", 0.0), span("wait_batch", 0.0, 2.0), span("wait_batch", 2.0, 4.0)]
    running = Running.of(np.zeros(8), np.full(8, 4.0))
    judged = Judged(np.array([2.0, 4.0]), np.array([20.0, 3.0]))  # in the first step more than are generated
    assert (
        split(events, running, judged).seconds() | {"reward": 2.0, "generation": 2.0}
        == split(events, running, judged).seconds()
    )


def test_attempts_are_apart() -> None:
    events = [
        instant("loop_started", 0.0), span("train", 0.0, 3.0), instant("restart", 5.0), instant("fleet_started", 20.0),
        span("publish", 20.0, 21.0), instant("loop_started", 21.0), span("train", 21.0, 22.0),
    ]  # fmt: skip
    found = split(events, Running(np.array([]), np.array([])), NOTHING)
    assert found.seconds()["training"] == 4.0
    assert sum(found.seconds().values()) == 4.0


def test_counters_may_begin_anew() -> None:
    assert differences([{"n": 3}, {"n": 5}, {"n": 2}, {}], "n").tolist() == [3, 2, 2, 0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    recorded = read(write_run(tmp_path_factory.mktemp("run"), Scenario(steps=2)))
    with closing(recorded.connection):
        yield recorded


def test_drafting_by_position_and_batch_size(run: Any) -> None:
    arms = [(1, 0, 100.0), (1, 3, 200.0), (1, 5, 150.0), (32, 0, 1000.0), (32, 3, 800.0), (64, 3, 5.0)]
    speculation = [
        {"batch": batch, "depth": depth, "verify": depth, "steps": 10, "tokens_per_second": speed}
        for batch, depth, speed in arms
    ]
    rows = [
        {"step": 0, "drafts": 10, "accepted_tokens": 5},
        {"step": 1, "drafts": 30, "accepted_tokens": 45, "accepted_by_position": [27, 18], "speculation": speculation},
    ]
    length, position, gain = curves.drafting(dataclasses.replace(run, rows=rows))
    assert length["series"][0]["y"] == [1.5, 3.0]
    assert position["values"] == [0.9, 0.6]
    assert (gain["labels"], gain["values"], gain["marked"]) == (["1+", "32+"], [2.0, 0.8], [1])
    assert curves.drafting(run) == []


def test_what_training_the_head_took_and_was_expected_to_bring(run: Any) -> None:
    rows = [
        {"step": 0, "drafts": 10, "accepted_tokens": 5, "drafter": {"seconds": 1.0, "acceptance": None}},
        {
            "step": 1,
            "drafts": 30,
            "accepted_tokens": 45,
            "drafter": {"seconds": 4.0, "seconds_beside": 0.5, "acceptance": 2.5},
        },
    ]
    length, training = curves.drafting(dataclasses.replace(run, rows=rows))
    assert [series["y"] for series in length["series"]] == [[1.5, 3.0], [None, 2.5]]
    assert [series["y"] for series in training["series"]] == [[1.0, 4.0], [None, 0.5]]


def test_memory_of_the_gpu_and_of_processes(run: Any) -> None:
    rows = [{"step": 0, "trainer_peak_memory_bytes": 3 << 30, "resident_bytes": {"driver": 1 << 30, "trainer": None}}]
    gpu, host = curves.memory(dataclasses.replace(run, rows=rows))
    assert gpu["series"] == [{"name": "trainer, peak", "x": [1], "y": [3.0]}]
    assert [(line["name"], line["y"]) for line in host["series"]] == [("driver", [1.0]), ("trainer", [None])]


def test_long_curves_become_means(run: Any) -> None:
    rows = [{"step": step, "reward": float(step), "samples": 1} for step in range(2 * curves.POINTS)]
    line = curves.learning(dataclasses.replace(run, rows=rows))[0]["series"][0]
    assert line["x"][:2] == [2, 4]
    assert line["y"][:2] == [0.5, 2.5]


def test_lengths_are_counted_in_whole_tokens(run: Any) -> None:
    completions = dict(run.completions) | {"answer_tokens": np.array([1, 1, 2, 100])}
    chart = curves.distributions(dataclasses.replace(run, completions=completions))[0]
    assert chart["values"][0] == 3
    assert chart["ranges"][0] == "1 to 4"
    assert sum(chart["values"]) == 4


def test_tokens_that_are_one_character_together() -> None:
    """The bytes of a euro sign are three tokens; spaces at the front of words stay."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁b": 257}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<0x00>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [256, *"€".encode(), 257]
    assert texts(ids, backend.decode) == ["a", "", "", "€", " b"]
    assert texts(ids[:3], backend.decode)[:2] == ["a", ""]
    assert texts([], backend.decode) == []


def test_the_environment_names_no_place_and_no_person() -> None:
    found = environment()
    assert found["python"].startswith("3.")
    assert {"asyncrl", "torch", "cpus", "system"} <= set(found)
    assert os.uname().nodename not in " ".join(found.values()) or os.uname().nodename == "localhost"
    assert str(Path.home()) not in " ".join(found.values())


def test_memory_of_processes_that_are_there() -> None:
    found = resident_bytes({"driver": os.getpid(), "buffer": os.getpid(), "gone": 2**22 + 1})
    assert list(found) == ["driver"]
    assert found["driver"] > 1 << 20


def test_the_parts_of_rewards_are_shown_with_samples_and_as_curves(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", parts={(0, 1): {"right": 1.0, "step": 0.5}})
    row = {"step": 0, "version": 1, "time": 103.0, "loop_seconds": 4.0, "samples": 4, "reward": 0.5}
    parts = [{"right": 1.0, "step": 0.5}, None, {"right": 0.0, "step": None}]
    rows = [row | {"step": step, "reward_parts": found} for step, found in enumerate(parts)]
    pq.write_table(pa.Table.from_pylist(rows), path / "metrics.parquet")
    run = read(path)
    shown = samples(run)
    assert shown is not None
    assert {(s["group"], s["sample"]): s["parts"] for s in shown["samples"] if s["parts"]} == {
        (0, 1): {"right": 1.0, "step": 0.5}
    }
    (chart,) = [chart for chart in curves.learning(run) if chart["title"] == "Reward parts"]
    assert [(line["name"], line["x"], line["y"]) for line in chart["series"]] == [
        ("right", [1, 2, 3], [1.0, None, 0.0]),
        ("step", [1, 2, 3], [0.5, None, None]),
    ]


def test_what_lies_before_each_later_turn_of_a_conversation() -> None:
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE trajectories (versions INTEGER[])")
        connection.execute("INSERT INTO trajectories VALUES ([-1, -1, 0, 0, -1, -1, 0, -1, 1]), ([-1, 3, 3]), ([-1])")
        assert connection.execute(AGAIN_BY_TURNS).fetchone() == (4 + 7,)
