"""Run directories made by hand: the buffer's own writer, events and metrics with known figures."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.buffer.journal import Admitted, Advanced, Begun, Committed, Delivered, Dropped, Journal, Record
from asyncrl.buffer.payloads import open_log, pack_slot
from asyncrl.config import Buffer, Run
from asyncrl.data.arrow import encode
from asyncrl.system.run_directory import RunDirectory, replace
from asyncrl.types import Segment, Slot, Trajectory
from pipelines.compose import to_yaml

RUN_ID = "made"


def answer(
    group: int, sample: int, reward: float, versions: Sequence[int], *, start: float = 0.0, **changes: Any
) -> Trajectory:
    """Three given tokens, then two sampled by each of `versions`; it takes a second for each version."""
    sampled = [Segment.sampled([10, 11], [-0.5, -0.25], version) for version in versions]
    fields: dict[str, Any] = {
        "slot": Slot(group, sample),
        "prompt": f"made/{group}",
        "segments": (Segment.given([1, 2, 3]), *sampled),
        "reward": reward,
        "finish": "stop",
        "started": 100.0 + start,
        "finished": 100.0 + start + len(versions),
        "engine": f"rollout-{sample}",
    }
    return Trajectory(**(fields | changes))


def write_log(directory: Path, trajectories: Sequence[Trajectory], *, seal: bool = True) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = open_log(directory, RUN_ID, Buffer())
    list(log.recover())
    log.append([(pack_slot(t.slot), encode(t)) for t in trajectories])
    if seal:
        log.seal()


def write_journal(directory: Path, records: Sequence[Record]) -> None:
    journal = Journal(directory, run_id=RUN_ID, sync=False)
    journal.recover()
    journal.write(Begun(2, 2, 1), *records)
    journal.close()


def empty_run(path: Path) -> RunDirectory:
    directory = RunDirectory.create(path)
    replace(directory.config, to_yaml(Run(name="made", steps=3)).encode())
    return directory


def small_run(path: Path, parts: Mapping[tuple[int, int], dict[str, float]] | None = None) -> Path:
    """Five groups of two.

    Step 0 trained on groups 0 and 1 in two passes; group 2 was dropped when its sample 1 failed; step 1 has got group 3
    so far; group 4 waits for its second sample.
    """
    directory = empty_run(path)
    answers = [
        answer(0, 0, 1.0, [0]),
        answer(0, 1, 0.0, [0]),
        answer(1, 0, 0.5, [0]),
        answer(1, 1, 0.5, [0], finish="length"),
        answer(2, 0, 0.25, [0, 1], start=5.0),
        answer(3, 0, 1.0, [0, 1], start=5.0),
        answer(3, 1, 0.0, [0, 1, 1], start=5.0),
        answer(4, 0, 1.0, [1], start=9.0),
    ]
    told = [msgspec.structs.replace(t, parts=(parts or {}).get((t.slot.group, t.slot.sample), {})) for t in answers]
    write_log(directory.trajectories, told)
    records: list[Record] = [Admitted(group, 0, 1e9, 64) for group in range(4)]
    records += [Delivered(0, (0,)), Delivered(0, (1,)), Committed(0), Advanced(1), Dropped(2, "reward_error", 1, 3)]
    records += [Admitted(4, 1, 1e9, 64), Delivered(1, (3,))]
    write_journal(directory.trajectories, records)
    _write_course(directory)
    return path


def _write_course(directory: RunDirectory) -> None:
    events: list[dict[str, Any]] = [
        {"kind": "fleet_started", "time": 99.0, "first_step": 0},
        {"kind": "wait_batch", "time": 100.0, "seconds": 1.5, "step": 0, "groups": 1},
        {"kind": "train", "time": 101.5, "seconds": 0.5, "step": 0, "groups": 1},
        {"kind": "train", "time": 102.0, "seconds": 0.5, "step": 0, "groups": 1},
        {"kind": "update", "time": 102.5, "seconds": 0.25, "step": 0},
        {"kind": "publish", "time": 102.75, "seconds": 0.25, "version": 1},
        {"kind": "evaluation", "time": 103.0, "seconds": 1.0, "step": 1, "scores": {"sampled": 0.5, "greedy": 0.75}},
        {"kind": "alarm", "time": 104.0, "version": 1, "figure": "ess", "text": "ess=0.1 is low"},
        {"kind": "train", "time": 108.5, "seconds": 0.5, "step": 1, "groups": 1},
    ]
    replace(directory.events, b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    row = {"step": 0, "version": 1, "time": 103.0, "loop_seconds": 4.0, "samples": 4, "reward": 0.5, "running": 2}
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row | {"buffered": 3, "staleness_mean": 0.0, "ess": 0.9}]), sink)
    replace(directory.metrics, sink.getvalue())
