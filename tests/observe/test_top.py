"""`asyncrl top`: a run seen from outside, at its beginning, going on, ended, killed."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from asyncrl.errors import ConfigError
from asyncrl.observe.query.tables import METRICS, open_run
from asyncrl.observe.top import Load, Watch
from pipelines.cli.top import draw, sparkline
from tests.observe.test_trace import validate, written
from tests.support import quickstart_runs
from tests.support.command import asyncrl
from tests.support.recorded_runs import answer, empty_run, small_run, write_log


def shown(run: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(draw(Watch(run).look()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@contextmanager
def driver(run: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is noted as the run's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (run / "actors.json").write_text(json.dumps({"driver": process.pid}))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_before_anything_happened(tmp_path: Path) -> None:
    found = Watch(empty_run(tmp_path / "run").path).look()
    assert (found.state, found.step, found.steps) == ("starting", 0, 3)
    assert "no step is finished yet" in shown(tmp_path / "run")


def test_figures_by_hand(tmp_path: Path) -> None:
    found = Watch(small_run(tmp_path / "run")).look()
    assert (found.step, found.held_out, found.rewards, found.elapsed) == (1, 0.5, (0.5,), 4.0)
    assert [event["kind"] for event in found.events] == ["fleet_started", "evaluation", "alarm"]
    engine = found.engines["rollout-0"]
    assert (engine.completions_per_second, engine.tokens_per_second, engine.mean_seconds) == (5 / 9, 14 / 9, 1.4)
    assert "ess=0.1 is low" in shown(tmp_path / "run")


def test_the_load_of_each_engine(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    told = {"engine": ["rollout-0", "rollout-7"], "version": [2, 1], "running": [5, 0], "waiting": [3, 0]}
    rows = [
        {"step": step, "version": step + 1, "time": 100.0 + 4 * step, "loop_seconds": 4.0 * step, "samples": 4,
         "reward": 0.5, "engines": told | {"generated_tokens": [9, 9], "busy_seconds": [1.0 + 3 * step, 2.0],
         # The second was started again in between.
         "prefilled_tokens": [100 + 10 * step, 50 - 20 * step], "cached_tokens": [10 + 30 * step, 40 - 30 * step],
         "moved": [0, 4]}}
        for step in range(2)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), run / "metrics.parquet")
    engines = Watch(run).look().engines
    assert {name: engine.load for name, engine in engines.items()} == {
        "rollout-0": Load(version=2, behind=0, running=5, waiting=3, places=128, busy=0.75, cached=0.75),
        "rollout-1": None,
        "rollout-7": Load(version=1, behind=1, running=0, waiting=0, places=128, busy=None, cached=0.25, moved=4),
    }
    said = shown(run)
    assert "75%" in said
    assert "25%" in said
    assert "5 of 128" in said
    assert "1, 1 behind" in said


def test_what_is_written_later_is_read_then(tmp_path: Path) -> None:
    directory = empty_run(tmp_path / "run")
    watch = Watch(directory.path)
    watch.look()
    write_log(directory.trajectories, [answer(0, 0, 1.0, [0])], seal=False)
    with directory.events.open("ab") as file:
        file.write(b'{"kind":"alarm","time":1.0,"text":"one"}\n{"kind":"alarm","time":2.0,')
        file.flush()
        found = watch.look()
        assert [event["text"] for event in found.events] == ["one"]
        assert list(found.engines) == ["rollout-0"]
        file.write(b'"text":"two"}\n')
    write_log(directory.trajectories, [answer(0, 1, 1.0, [0])])  # into the open file, which is sealed then
    write_log(directory.trajectories, [answer(1, 2, 1.0, [0])])  # into the next one
    found = watch.look()
    assert [event["text"] for event in found.events] == ["one", "two"]
    assert list(found.engines) == ["rollout-0", "rollout-1", "rollout-2"]


def test_a_driver_that_is_killed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with driver(run) as process:
        watch = Watch(run)
        assert watch.look().state == "running"
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = watch.look()
    assert found.state == "dead"
    assert "asyncrl resume" in found.says


def test_the_summary_of_an_earlier_attempt(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run / "summary.json").write_text('{"status": "failed", "error": "no space\\nmore"}')
    watch = Watch(run)
    found = watch.look()
    assert (found.state, found.says) == ("ended", "ended, failed: no space")
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "fleet_started", "time": time.time() + 1, "first_step": 1}) + "\n")
    with driver(run):
        assert watch.look().state == "running"


def test_another_process_with_the_drivers_number(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with driver(run):
        os.utime(run / "actors.json", (1e9, 1e9))  # noted long before this process began
        assert Watch(run).look().state == "dead"


def test_q_ends_it(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    words = [quickstart_runs.COMMAND, "top", str(run)]
    with driver(run), subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as top:
        os.close(theirs)
        try:
            said = b""
            while b"running (process" not in said:
                said += os.read(ours, 4096)
            os.write(ours, b"q")
            with suppress(OSError):  # at its end
                while said := os.read(ours, 4096):
                    pass
            assert top.wait(timeout=30) == 0
        finally:
            top.kill()
            os.close(ours)


def test_a_real_run_from_another_process(tmp_path: Path, model: Path) -> None:
    process = quickstart_runs.start(tmp_path, model, "steps=6")
    run = tmp_path / "run"
    states: set[str] = set()
    counts = [0]
    watch: Watch | None = None
    while process.poll() is None:
        time.sleep(0.25)
        try:
            watch = watch or Watch(run)
        except ConfigError:
            continue
        states.add(watch.look().state)
        with open_run(run) as connection:
            counts += connection.execute("SELECT count(*) FROM trajectories").fetchall()[0]
    quickstart_runs.finish(process)
    assert watch is not None
    found = watch.look()
    assert "running" in states
    assert states <= {"starting", "running", "ended"}
    assert counts == sorted(counts)
    assert (found.state, found.says, found.step) == ("ended", "ended, ok", 6)
    assert {engine.load.version for engine in found.engines.values() if engine.load} == {6}
    assert METRICS.keys() <= set(pq.read_schema(run / "metrics.parquet").names)
    assert "step 6/6 (100%)" in asyncrl("top", run).out
    assert asyncrl("trace", run).code == 0
    events = written(run / "trace.json")["traceEvents"]
    validate(events)
    assert sum(event["ph"] == "f" for event in events) == 6 * 4 * 4


@pytest.mark.parametrize(("values", "drawn"), [((), ""), ((1.0,), "▁"), ((0.0, 1.0, 0.5), "▁█▄")])
def test_a_curve_of_letters(values: tuple[float, ...], drawn: str) -> None:
    assert sparkline(values) == drawn
