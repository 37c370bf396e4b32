"""Trajectory <-> Arrow: one row per trajectory, plain types only, so any Arrow reader can query a run.

A payload is one record-batch message without its schema. It is built from, and read back into, raw buffers: no token
ever becomes a Python object. Whoever decodes a payload did not necessarily write it, so everything is checked.
"""

import struct
from collections.abc import Iterable
from itertools import pairwise
from math import isfinite
from typing import Any, cast, get_args

import numpy as np
import pyarrow

from asyncrl.types import GIVEN, Finish, Floats, Ints, Segment, Slot, Trajectory

pa = cast(Any, pyarrow)  # its type stubs are incomplete: half of what is used here is unknown to them

INT64, INT32, FLOAT32, FLOAT64, TEXT = pa.int64(), pa.int32(), pa.float32(), pa.float64(), pa.string()
INTS = pa.list_(pa.field("item", INT32, nullable=False))
FLOATS = pa.list_(pa.field("item", FLOAT32, nullable=False))
COLUMNS = {
    "group": INT64,
    "sample": INT32,
    "prompt": TEXT,
    "engine": TEXT,
    "precision": TEXT,
    "finish": TEXT,
    "reward": FLOAT64,
    "started": FLOAT64,
    "finished": FLOAT64,
    "tokens": INTS,
    "logprobs": FLOATS,
    "versions": INTS,
}
SCHEMA: Any = pa.schema([pa.field(name, kind, nullable=False) for name, kind in COLUMNS.items()])
"""`logprobs` is 0 and `versions` is -1 where a token was given to the model."""

FINISHES: tuple[str, ...] = get_args(Finish)


def encode(trajectory: Trajectory) -> bytes:
    """The payload of one trajectory. Empty segments vanish and neighbours of one version become one segment."""
    segments = trajectory.segments
    versions = np.repeat(np.array([s.version for s in segments], np.int32), [len(s) for s in segments])
    columns = [
        _number(INT64, "<q", trajectory.slot.group),
        _number(INT32, "<i", trajectory.slot.sample),
        _text(trajectory.prompt),
        _text(trajectory.engine),
        _text(trajectory.precision),
        _text(trajectory.finish),
        _number(FLOAT64, "<d", trajectory.reward),
        _number(FLOAT64, "<d", trajectory.started),
        _number(FLOAT64, "<d", trajectory.finished),
        _list(INTS, INT32, b"".join([s.token_bytes for s in segments])),
        _list(FLOATS, FLOAT32, b"".join([s.logprob_bytes or bytes(len(s.token_bytes)) for s in segments])),
        _list(INTS, INT32, versions.tobytes()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize().to_pybytes()


def decode(payload: bytes) -> Trajectory:
    """Read a payload back, or raise ValueError with what is wrong with it."""
    batch = _read_batch(payload)
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"not a trajectory payload: {error}") from None
    columns = batch.columns
    if batch.num_rows != 1 or any(column.null_count for column in columns):
        raise ValueError(f"a trajectory payload holds one row without nulls; this one has {batch.num_rows} rows")
    group, sample, prompt, engine, precision, finish, reward, started, finished = (
        column[0].as_py() for column in columns[:9]
    )
    tokens = _values(columns[9], np.dtype(np.int32))
    logprobs = _values(columns[10], np.dtype(np.float32))
    versions = _values(columns[11], np.dtype(np.int32))
    trajectory = Trajectory(
        slot=Slot(group, sample),
        prompt=prompt,
        segments=_segments(tokens, logprobs, versions),
        reward=reward,
        finish=finish,
        started=started,
        finished=finished,
        engine=engine,
        precision=precision,
    )
    _check(trajectory, tokens, logprobs, versions)
    return trajectory


def read_table(payloads: Iterable[bytes]) -> Any:
    """Payloads that were already checked, as one table for SQL or Parquet."""
    return pa.Table.from_batches([_read_batch(payload) for payload in payloads], SCHEMA).combine_chunks()


def _read_batch(payload: bytes) -> Any:
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(payload), SCHEMA)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"not a trajectory payload: {error}") from None


def _number(kind: Any, form: str, value: float) -> Any:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(struct.pack(form, value))])


def _text(value: str) -> Any:
    data = value.encode()
    return pa.Array.from_buffers(TEXT, 1, [None, pa.py_buffer(struct.pack("<ii", 0, len(data))), pa.py_buffer(data)])


def _list(kind: Any, item: Any, data: bytes) -> Any:
    items = pa.Array.from_buffers(item, len(data) // 4, [None, pa.py_buffer(data)])
    offsets = pa.py_buffer(struct.pack("<ii", 0, len(data) // 4))
    return pa.Array.from_buffers(kind, 1, [None, offsets], children=[items])


def _values(column: Any, dtype: np.dtype[Any]) -> Any:
    """The items of a list column of one row, without a copy; its offsets are validated before."""
    _, offsets, validity, items = column.buffers()
    if validity is not None:
        raise ValueError("a trajectory payload holds no nulls, but this one has a validity bitmap for list items")
    start, stop = struct.unpack_from("<ii", offsets)
    return np.frombuffer(items or b"", dtype, stop)[start:]


def _segments(tokens: Ints, logprobs: Floats, versions: Ints) -> tuple[Segment, ...]:
    """Cut where the version changes."""
    if not 0 < len(tokens) == len(logprobs) == len(versions):
        raise ValueError(
            f"a trajectory needs tokens, and a log-probability and a version for each; this payload has "
            f"{len(tokens)}, {len(logprobs)} and {len(versions)}"
        )
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), len(versions)]
    return tuple(
        Segment(
            token_bytes=tokens[start:stop].tobytes(),
            logprob_bytes=b"" if versions[start] == GIVEN else logprobs[start:stop].tobytes(),
            version=int(versions[start]),
        )
        for start, stop in pairwise(cuts)
    )


def _check(trajectory: Trajectory, tokens: Ints, logprobs: Floats, versions: Ints) -> None:
    """What the Arrow types cannot promise."""
    slot, numbers = trajectory.slot, (trajectory.reward, trajectory.started, trajectory.finished)
    complaints = {
        "group and sample must not be negative": slot.group < 0 or slot.sample < 0,
        f"finish={trajectory.finish!r} is none of {FINISHES}": trajectory.finish not in FINISHES,
        f"reward, started, finished = {numbers} must be finite": not all(map(isfinite, numbers)),
        "token ids must not be negative": tokens.min() < 0,
        f"versions must be {GIVEN} (given) or more": versions.min() < GIVEN,
        "log-probabilities must be finite": not np.isfinite(logprobs).all(),
        "given tokens carry no log-probability": logprobs[versions == GIVEN].any(),
    }
    for complaint, holds in complaints.items():
        if holds:
            raise ValueError(f"trajectory of group {slot.group}, sample {slot.sample}: {complaint}")
