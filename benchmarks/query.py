"""SQL over a run of a million trajectories: each ready query, and the whole command, against 2 seconds.

    python -m benchmarks.query [--trajectories 1000000] [--directory DIR]

The run is written first, in the buffer's own format by its own writer: groups of 8 short answers, one group in 20
dropped. `command` is `asyncrl query` as a shell starts it, with the interpreter and its imports. Files are in the page
cache, as those of a run going on are.
"""

import argparse
import io
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffer.journal import Admitted, Advanced, Begun, Committed, Delivered, Dropped, Journal, Record
from asyncrl.buffer.payloads import open_log, pack_slot
from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.data.arrow import encode
from asyncrl.drop_reasons import DropReason
from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import open_run
from asyncrl.system.run_directory import RunDirectory, replace
from asyncrl.types import Segment, Slot, Trajectory
from pipelines.compose import to_yaml

BAR = 2.0
GROUP, GROUPS_PER_STEP, ENGINES, PROMPTS = 8, 64, 4, 2000
MOULDS, MARK, PROMPT_DIGITS = 300, 0x11223344, 6
BATCH = 500
"""Groups whose trajectories are written with one call."""
TAKE, DROPPED = 4, 20
"""Groups of one delivery, and of how many one is dropped."""
STEP_SECONDS, LAG_SECONDS = 2.0, 3.0
"""Of a step, and from the beginning of its first answers to that of its training."""
START = 1.7e9


def write_run(path: Path, trajectories: int, *, seed: int = 0) -> None:
    """A run directory with so many trajectories, rounded down to whole groups."""
    run = Run(
        name="made",
        rollout=Rollout(group_size=GROUP, max_tokens=256),
        flow=Flow(groups_per_step=GROUPS_PER_STEP),
        max_staleness=2,
    )
    directory = RunDirectory.create(path)
    replace(directory.config, to_yaml(run).encode())
    directory.trajectories.mkdir(mode=0o700)
    rng = np.random.default_rng(seed)
    moulds = [_Mould(rng) for _ in range(MOULDS)]
    groups = trajectories // GROUP
    log = open_log(directory.trajectories, run.name, Buffer())
    list(log.recover())
    for first in range(0, groups, BATCH):
        log.append(list(_answers(range(first, min(first + BATCH, groups)), moulds, rng)))
    log.seal()
    journal = Journal(directory.trajectories, run_id=run.name, sync=False)
    journal.recover()
    records = list(_decisions(groups))
    journal.write(Begun(GROUP, GROUPS_PER_STEP, run.max_staleness), *records)
    journal.close()
    _write_course(directory, sum(isinstance(record, Committed) for record in records))


class _Mould:
    """An encoded answer whose numbers are overwritten: to encode a million of them would take minutes."""

    def __init__(self, rng: np.random.Generator) -> None:
        first, second = (int(length) for length in rng.integers(2, 40, 2))
        self.seconds = 0.02 * (first + second)
        made = encode(
            Trajectory(
                slot=Slot(MARK, MARK + 1),
                prompt="made/train/" + "?" * PROMPT_DIGITS,
                segments=(
                    Segment.given(rng.integers(0, 1000, 8)),
                    Segment.sampled(rng.integers(0, 1000, first), -rng.random(first), MARK + 2),
                    Segment.sampled(rng.integers(0, 1000, second), -rng.random(second), MARK + 3),
                ),
                reward=float(MARK),
                started=float(MARK + 1),
                finished=float(MARK + 2),
                finish="stop" if second < 38 else "length",
                engine=f"rollout-{int(rng.integers(ENGINES))}",
            )
        )
        self._payload = bytearray(made)
        self._places = [
            (form, made.index(struct.pack(form, value)))
            for form, value in (("<q", MARK), ("<i", MARK + 1), ("<d", MARK), ("<d", MARK + 1), ("<d", MARK + 2))
        ]
        self._prompt = made.index(b"?" * PROMPT_DIGITS)
        self._versions = [
            (made.index(struct.pack("<i", MARK + 2)), first),
            (made.index(struct.pack("<i", MARK + 3)), second),
        ]

    def cast(self, group: int, sample: int, reward: float, started: float, finished: float) -> bytes:
        for (form, place), value in zip(self._places, (group, sample, reward, started, finished), strict=True):
            struct.pack_into(form, self._payload, place, value)
        self._payload[self._prompt : self._prompt + PROMPT_DIGITS] = b"%0*d" % (PROMPT_DIGITS, group % PROMPTS)
        admitted = _step_of(group)
        for (place, length), version in zip(self._versions, (max(0, admitted - 1), admitted), strict=True):
            self._payload[place : place + 4 * length] = struct.pack("<i", version) * length
        return bytes(self._payload)


def _answers(groups: range, moulds: Sequence[_Mould], rng: np.random.Generator) -> Iterator[tuple[bytes, bytes]]:
    """Slot and payload of each sample."""
    draws = rng.random((len(groups), GROUP, 3)).tolist()
    for group, samples in zip(groups, draws, strict=True):
        begun = START + _step_of(group) * STEP_SECONDS
        for sample, (which, luck, later) in enumerate(samples):
            mould = moulds[int(which * len(moulds))]
            payload = mould.cast(group, sample, float(luck < 0.5), begun + later, begun + later + mould.seconds)
            yield pack_slot(Slot(group, sample)), payload


def _step_of(group: int) -> int:
    """That it is admitted and trained in, if it is not dropped."""
    return (group - group // DROPPED) // GROUPS_PER_STEP


def _decisions(groups: int) -> Iterator[Record]:
    step = 0
    taken: list[int] = []
    for group in range(groups):
        yield Admitted(group, step, START + 1e6, 1024)
        if group % DROPPED == DROPPED - 1:
            yield Dropped(group, DropReason.TIMEOUT)
            continue
        taken.append(group)
        if len(taken) % TAKE == 0:
            yield Delivered(step, tuple(taken[-TAKE:]))
        if len(taken) == GROUPS_PER_STEP:
            yield Committed(step)
            step, taken = step + 1, []
            yield Advanced(step)


def _write_course(directory: RunDirectory, steps: int) -> None:
    """Metrics and events of the steps."""
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "version": step + 1,
            "time": START + (step + 1) * STEP_SECONDS,
            "loop_seconds": (step + 1) * STEP_SECONDS,
            "samples": GROUP * GROUPS_PER_STEP,
            "tokens": 40 * GROUP * GROUPS_PER_STEP,
            "reward": 0.5,
            "loss": 0.0,
            "staleness_mean": 1.0,
            "staleness_max": 1,
            "wait_seconds": 0.4,
            "train_seconds": 1.5,
            "sync_seconds": 0.1,
            "generated_tokens": 40 * GROUP * GROUPS_PER_STEP * (step + 1),
            "running": 200,
            "in_flight": 300,
            "buffered": 100,
        }
        for step in range(steps)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    replace(directory.metrics, sink.getvalue())
    events = [{"kind": "fleet_started", "time": START, "first_step": 0}]
    for step in range(steps):
        time = START + step * STEP_SECONDS + LAG_SECONDS
        for _ in range(GROUPS_PER_STEP // TAKE):
            events.append({"kind": "wait_batch", "time": time, "seconds": 0.02, "step": step, "groups": TAKE})
            events.append({"kind": "train", "time": time + 0.02, "seconds": 0.09, "step": step, "groups": TAKE})
            time += 0.11
        events.append({"kind": "update", "time": time, "seconds": 0.05, "step": step})
        events.append({"kind": "publish", "time": time + 0.05, "seconds": 0.1, "version": step + 1})
    replace(directory.events, b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="keep the run here; one that is there is used")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.directory or Path(scratch) / "made"
        if not path.exists():
            begun = time.perf_counter()
            write_run(path, options.trajectories)
            print(f"{options.trajectories} trajectories written in {time.perf_counter() - begun:.0f} s")
        measure(path)


def measure(path: Path) -> None:
    begun = time.perf_counter()
    with open_run(path) as run:
        opened = time.perf_counter() - begun
        print(f"{'open':<24}{opened:6.2f} s")
        slowest = 0.0
        for name, ready in READY.items():
            begun = time.perf_counter()
            rows = run.execute(ready.sql).fetchall()
            took = time.perf_counter() - begun
            slowest = max(slowest, took)
            print(f"{name:<24}{took:6.2f} s  {len(rows)} rows")
    _judge("opening and the slowest query", opened + slowest)
    slowest = 0.0
    for name in READY:
        begun = time.perf_counter()
        words = [str(Path(sys.executable).with_name("asyncrl")), "query", str(path), name]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        took = time.perf_counter() - begun
        slowest = max(slowest, took)
        print(f"command {name:<24}{took:6.2f} s")
    _judge("the slowest command", slowest)


def _judge(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.2f} s, bar {BAR:g} s: {'held' if seconds <= BAR else 'NOT held'}")


if __name__ == "__main__":
    main()
