"""Trajectory <-> Arrow: one row per trajectory, plain types only, so any Arrow reader can query a run.

A payload is one record-batch message without its schema. It is built from, and read back into, raw buffers: no token
ever becomes a Python object. Whoever decodes a payload did not necessarily write it, so everything is checked.
"""

import struct
from collections.abc import Iterable
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pyarrow

from asyncrl.data import ipc
from asyncrl.data.parts import Parts, from_text, to_text
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
PARTED: Any = SCHEMA.append(pa.field("parts", TEXT, nullable=False))
"""Of a row whose reward has parts, as JSON. Others lack the column, so that they cost nothing more than they ever did,
and a log holds rows of both kinds: its schema hash is that of the columns that all have."""
WIDER = {len(PARTED) + sum(pa.types.is_list(kind) for kind in COLUMNS.values()): PARTED}

BITMAPS = (0, 1, 3, 5, 8, 11, 14, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35)
"""Which buffers of a row are validity bitmaps: a number has one buffer more, a text two, a list one and its items."""
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
    if trajectory.parts:
        columns.append(_text(to_text(trajectory.parts)))
    schema = PARTED if trajectory.parts else SCHEMA
    return pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()


class Row(NamedTuple):
    """A checked payload, its lists as views into it: for those who need not hold a Trajectory."""

    slot: Slot
    prompt: str
    engine: str
    precision: str
    finish: str
    reward: float
    started: float
    finished: float
    tokens: Ints
    logprobs: Floats
    runs: tuple[tuple[int, int, int], ...]
    """Start, stop and version of each run of tokens with one version."""
    parts: Parts

    @property
    def sampled_tokens(self) -> int:
        return sum(stop - start for start, stop, version in self.runs if version != GIVEN)

    @property
    def oldest_version(self) -> int:
        return min((version for _, _, version in self.runs if version != GIVEN), default=GIVEN)


def read_row(payload: bytes) -> Row:
    """Check all of a payload, or raise ValueError with what is wrong with it."""
    batch = _read_batch(payload)
    if batch.num_rows != 1:
        raise ValueError(f"a trajectory payload holds one row, not {batch.num_rows}")
    # One call for the buffers of all columns: a Python object for each column would cost more than the rest.
    buffers = batch.to_struct_array().buffers()
    if any(buffers[i] is not None for i in BITMAPS if i < len(buffers)):
        raise ValueError("a trajectory payload holds no nulls, but this one has a validity bitmap")
    row = Row(
        slot=Slot(_as_number("<q", buffers[2]), _as_number("<i", buffers[4])),
        prompt=_as_text(*buffers[6:8]),
        engine=_as_text(*buffers[9:11]),
        precision=_as_text(*buffers[12:14]),
        finish=_as_text(*buffers[15:17]),
        reward=_as_number("<d", buffers[18]),
        started=_as_number("<d", buffers[20]),
        finished=_as_number("<d", buffers[22]),
        tokens=_as_array(np.int32, buffers[24], buffers[26]),
        logprobs=_as_array(np.float32, buffers[28], buffers[30]),
        runs=_runs(_as_array(np.int32, buffers[32], buffers[34])),
        parts=from_text(_as_text(*buffers[36:38])) if len(buffers) > 36 else {},
    )
    if complaint := _complaint(row):
        raise ValueError(f"trajectory of group {row.slot.group}, sample {row.slot.sample}: {complaint}")
    return row


def decode(payload: bytes) -> Trajectory:
    """Read a payload back, or raise ValueError with what is wrong with it."""
    row = read_row(payload)
    segments = (
        Segment(
            token_bytes=row.tokens[start:stop].tobytes(),
            logprob_bytes=b"" if version == GIVEN else row.logprobs[start:stop].tobytes(),
            version=version,
        )
        for start, stop, version in row.runs
    )
    return Trajectory(
        slot=row.slot,
        prompt=row.prompt,
        segments=tuple(segments),
        reward=row.reward,
        finish=cast(Finish, row.finish),
        started=row.started,
        finished=row.finished,
        engine=row.engine,
        precision=row.precision,
        parts=row.parts,
    )


def read_table(payloads: Iterable[bytes]) -> Any:
    """Payloads as one table for SQL or Parquet; `parts` is null where a reward has none."""
    tables = [PARTED.empty_table(), *(pa.Table.from_batches([_read_batch(payload)]) for payload in payloads)]
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _read_batch(payload: bytes) -> Any:
    return ipc.read_batch(payload, SCHEMA, "a trajectory payload", WIDER)


def _number(kind: Any, form: str, value: float) -> Any:
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(struct.pack(form, value))])


def _text(value: str) -> Any:
    data = value.encode()
    return pa.Array.from_buffers(TEXT, 1, [None, pa.py_buffer(struct.pack("<ii", 0, len(data))), pa.py_buffer(data)])


def _list(kind: Any, item: Any, data: bytes) -> Any:
    items = pa.Array.from_buffers(item, len(data) // 4, [None, pa.py_buffer(data)])
    offsets = pa.py_buffer(struct.pack("<ii", 0, len(data) // 4))
    return pa.Array.from_buffers(kind, 1, [None, offsets], children=[items])


def _as_number(form: str, data: Any) -> Any:
    return struct.unpack_from(form, data)[0]


def _as_text(offsets: Any, data: Any) -> str:
    start, stop = struct.unpack_from("<ii", offsets)
    return data.to_pybytes()[start:stop].decode() if data else ""


def _as_array(dtype: Any, offsets: Any, items: Any) -> Any:
    start, stop = struct.unpack_from("<ii", offsets)
    return np.frombuffer(items or b"", dtype, stop)[start:]


def _runs(versions: Ints) -> tuple[tuple[int, int, int], ...]:
    """Cut where the version changes."""
    if not len(versions):
        return ()
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), len(versions)]
    return tuple((start, stop, int(versions[start])) for start, stop in pairwise(cuts))


def _complaint(row: Row) -> str | None:
    """What is wrong with a row that the Arrow types allow."""
    versions = row.runs[-1][1] if row.runs else 0
    if not 0 < len(row.tokens) == len(row.logprobs) == versions:
        return f"{len(row.tokens)} tokens, {len(row.logprobs)} log-probabilities and {versions} versions do not match"
    if min(row.slot.group, row.slot.sample) < 0:
        return "group and sample must not be negative"
    if row.finish not in FINISHES:
        return f"finish={row.finish!r} is none of {FINISHES}"
    if not all(map(isfinite, (row.reward, row.started, row.finished))):
        return f"reward={row.reward}, started={row.started} and finished={row.finished} must be finite"
    if min(version for _, _, version in row.runs) < GIVEN:
        return f"versions must be {GIVEN} (given) or more"
    if row.tokens.min() < 0:
        return "token ids must not be negative"
    if not np.isfinite(row.logprobs).all():
        return "log-probabilities must be finite"
    if any(row.logprobs[start:stop].any() for start, stop, version in row.runs if version == GIVEN):
        return "given tokens carry no log-probability"
    return None
