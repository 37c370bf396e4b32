"""Trajectory <-> Arrow: one row per trajectory, plain types only, so any Arrow reader can query a run.

A payload is one record-batch message without its schema. Whoever decodes a payload did not necessarily write it, so
everything is checked.

Most payloads are packed and unpacked without Arrow's help, in a fifth of the time for a short completion. A record
batch of one row and a fixed schema has metadata of a fixed shape, in which only lengths and offsets differ. `pack`
writes byte for byte what pyarrow writes; `unpack` reads exactly that shape, and bytes of any other shape are left to
Arrow.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pyarrow

from asyncrl.data import episodes, untrusted
from asyncrl.data.reward_parts import Parts, from_text, to_text
from asyncrl.types import GIVEN, Episode, Finish, Floats, Ints, Segment, Slot, Trajectory

pa = cast(Any, pyarrow)  # its type stubs are incomplete: half of what is used here is unknown to them

INT64, INT32, FLOAT32, FLOAT64, TEXT = pa.int64(), pa.int32(), pa.float32(), pa.float64(), pa.string()
BYTES = pa.binary()
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
and a log holds rows of all kinds: its schema hash is that of the columns that all have."""
ROUTED: Any = PARTED.append(pa.field("routes", BYTES, nullable=False))
"""Of a row with routes, as `Trajectory.route_bytes` has them; `parts` is empty where its reward has none."""
PLAYED: Any = ROUTED.append(pa.field("episode", TEXT, nullable=False))
"""Of a row of a harness, as JSON (`asyncrl.data.episodes`); `parts` and `routes` are empty where there are none."""
TAUGHT: Any = PLAYED.append(pa.field("teacher_logprobs", BYTES, nullable=False))
"""Of a row with teachers: float32 of each sampled token; the columns before are empty where there is nothing."""
RANKED: Any = TAUGHT.append(pa.field("teacher_top_k", BYTES, nullable=False))
"""Of a row with the likeliest tokens of a teacher, as `Trajectory.teacher_top_k_bytes` has them."""
WIDER = {
    len(wide) + sum(pa.types.is_list(kind) for kind in COLUMNS.values()): wide
    for wide in (PARTED, ROUTED, PLAYED, TAUGHT, RANKED)
}

BITMAPS = (0, 1, 3, 5, 8, 11, 14, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 38, 41, 44, 47)
"""Which buffers of a row are validity bitmaps: a number has one buffer more, a text two, a list one and its items."""
FINISHES: tuple[str, ...] = get_args(Finish)

PREFIX = struct.Struct("<40sq40s")
BEFORE_BODY_LENGTH = bytes.fromhex("ffffffff6803000014000000000000000c0016000600050008000c000c0000000003040018000000")
"""Marker, length of the metadata, and the beginning of its flatbuffer tables, which say where the rest is."""
AFTER_BODY_LENGTH = bytes.fromhex(
    "00000a0018000c00040008000a0000003c02000010000000010000000000000000000000" + "22000000"
)
BUFFERS = struct.Struct("<68q")
"""Offset and length of each."""
NODES = struct.Struct("<4xI30q")
"""Rows and nulls of each column, and of the items of each list."""
HEAD_SIZE = PREFIX.size + BUFFERS.size + NODES.size
SIZES = struct.Struct("<192xq40xq40xq40xq152xq")
"""Where the metadata says how long the four texts and the tokens are."""
Texts = tuple[str, str, str, str]
"""Prompt, engine, precision and finish."""
Numbers = tuple[float, float, float]
"""Reward, start and end."""
SHAPES = 4096
"""That are cached: completions of one length for prompts of one length share theirs."""


class Fields(NamedTuple):
    """A row as it lies in a payload."""

    group: int
    sample: int
    texts: Texts
    numbers: Numbers
    tokens: Ints
    logprobs: Floats
    versions: Ints
    parts: str | None = None
    """None in all rows that `unpack` reads: others are left to Arrow."""
    routes: bytes = b""
    episode: str = ""
    teacher: bytes = b""
    top_k: bytes = b""


class _Shape(NamedTuple):
    """All payloads whose texts and lists are as long."""

    head: bytes
    body: struct.Struct
    lengths: tuple[int, ...]
    """The offsets in the body: each text and list begins at 0 and ends where it is over."""


def encode(trajectory: Trajectory) -> bytes:
    """The payload of one trajectory. Empty segments vanish and neighbours of one version become one segment."""
    segments = trajectory.segments
    versions = [struct.pack("<i", s.version) * len(s) for s in segments]
    logprobs = [s.logprob_bytes or bytes(len(s.token_bytes)) for s in segments]
    payload = pack(
        trajectory.slot.group,
        trajectory.slot.sample,
        (trajectory.prompt, trajectory.engine, trajectory.precision, trajectory.finish),
        (trajectory.reward, trajectory.started, trajectory.finished),
        (b"".join([s.token_bytes for s in segments]), b"".join(logprobs), b"".join(versions)),
    )
    routes, episode, teacher = trajectory.route_bytes, trajectory.episode, trajectory.teacher_logprob_bytes
    if not (trajectory.parts or routes or episode is not None or teacher):
        return payload
    played = "" if episode is None else episodes.to_text(episode)
    return _widened(payload, trajectory.parts, routes, played, teacher, trajectory.teacher_top_k_bytes)


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
    routes: bytes
    episode: Episode | None
    teacher: bytes
    top_k: bytes

    @property
    def sampled_tokens(self) -> int:
        return sum(stop - start for start, stop, version in self.runs if version != GIVEN)

    @property
    def oldest_version(self) -> int:
        return min((version for _, _, version in self.runs if version != GIVEN), default=GIVEN)

    @property
    def turn_rewards(self) -> list[float]:
        return [] if self.episode is None else [turn.reward for turn in self.episode.turns]

    @property
    def earned(self) -> float:
        """Its reward, and what its turns had for themselves on average: by this samples of a group are compared."""
        return self.reward + (sum(own) / len(own) if (own := self.turn_rewards) else 0.0)


def read_row(payload: bytes) -> Row:
    """Check all of a payload, or raise ValueError with what is wrong with it."""
    found = unpack(payload) or fields(read_batch(payload))
    slot, runs = Slot(found.group, found.sample), _runs(found.versions)
    parts = {} if found.parts is None else from_text(found.parts)
    episode = episodes.from_text(found.episode) if found.episode else None
    lists = found.tokens, found.logprobs, runs
    row = Row(slot, *found.texts, *found.numbers, *lists, parts, found.routes, episode, found.teacher, found.top_k)
    if complaint := _complaint(row):
        raise ValueError(f"trajectory of group {slot.group}, sample {slot.sample}: {complaint}")
    return row


def fields(batch: Any) -> Fields:
    """The row of a batch that Arrow has read."""
    if batch.num_rows != 1:
        raise ValueError(f"a trajectory payload holds one row, not {batch.num_rows}")
    # One call for the buffers of all columns: a Python object for each column would cost more than the rest.
    buffers = batch.to_struct_array().buffers()
    if any(buffers[i] is not None for i in BITMAPS if i < len(buffers)):
        raise ValueError("a trajectory payload holds no nulls, but this one has a validity bitmap")
    prompt, engine, precision, finish = (_as_text(*buffers[i : i + 2]) for i in (6, 9, 12, 15))
    reward, started, finished = (_as_number("<d", buffers[i]) for i in (18, 20, 22))
    parts = _as_text(*buffers[36:38]) if len(buffers) > 36 else None
    routes = _as_bytes(*buffers[39:41]) if len(buffers) > 39 else b""
    episode = _as_text(*buffers[42:44]) if len(buffers) > 42 else ""
    teacher = _as_bytes(*buffers[45:47]) if len(buffers) > 45 else b""
    top_k = _as_bytes(*buffers[48:50]) if len(buffers) > 48 else b""
    return Fields(
        group=_as_number("<q", buffers[2]),
        sample=_as_number("<i", buffers[4]),
        texts=(prompt, engine, precision, finish),
        numbers=(reward, started, finished),
        tokens=_as_array(np.int32, buffers[24], buffers[26]),
        logprobs=_as_array(np.float32, buffers[28], buffers[30]),
        versions=_as_array(np.int32, buffers[32], buffers[34]),
        parts=(parts or None) if routes or episode or teacher else parts,
        routes=routes,
        episode=episode,
        teacher=teacher,
        top_k=top_k,
    )


def decode(payload: bytes) -> Trajectory:
    """Read a payload back, or raise ValueError with what is wrong with it."""
    row = read_row(payload)
    per_token = len(row.routes) // max(1, len(row.tokens) - 1)
    segments: list[Segment] = []
    routed = 0
    for start, stop, version in row.runs:
        fed = stop - 1 if version != GIVEN else routed
        segments.append(
            Segment(
                token_bytes=row.tokens[start:stop].tobytes(),
                logprob_bytes=b"" if version == GIVEN else row.logprobs[start:stop].tobytes(),
                version=version,
                route_bytes=row.routes[per_token * routed : per_token * fed],
            )
        )
        routed = fed
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
        episode=row.episode,
        teacher_logprob_bytes=row.teacher,
        teacher_top_k_bytes=row.top_k,
    )


def read_table(payloads: Iterable[bytes]) -> Any:
    """Payloads as one table for SQL or Parquet; `parts` is null where a reward has none."""
    tables = [PARTED.empty_table(), *(pa.Table.from_batches([read_batch(payload)]) for payload in payloads)]
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def read_batch(payload: bytes) -> Any:
    return untrusted.read_batch(payload, SCHEMA, "a trajectory payload", WIDER)


def _widened(payload: bytes, parts: Parts, routes: bytes, episode: str, teacher: bytes, top_k: bytes) -> bytes:
    """With the columns that not all rows have."""
    columns = [*read_batch(payload).columns, pa.array([to_text(parts) if parts else ""])]
    wide = RANKED if top_k else TAUGHT if teacher else PLAYED if episode else ROUTED if routes else PARTED
    further = [pa.array([routes], BYTES), pa.array([episode]), pa.array([teacher], BYTES), pa.array([top_k], BYTES)]
    columns += further[: len(wide) - len(columns)]
    return pa.RecordBatch.from_arrays(columns, schema=wide).serialize().to_pybytes()


def _as_number(form: str, data: Any) -> Any:
    return struct.unpack_from(form, data)[0]


def _as_text(offsets: Any, data: Any) -> str:
    return _as_bytes(offsets, data).decode()


def _as_bytes(offsets: Any, data: Any) -> bytes:
    start, stop = struct.unpack_from("<ii", offsets)
    return data.to_pybytes()[start:stop] if data else b""


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
    fed = len(row.tokens) - 1
    if row.routes and (not fed or len(row.routes) % fed or row.runs[-1][2] == GIVEN):
        return f"{len(row.routes)} bytes of routes are not those of all {len(row.tokens)} tokens but the last"
    if row.teacher and len(row.teacher) != 4 * row.sampled_tokens:
        return f"{len(row.teacher)} bytes of the teachers' log-probabilities are not those of its sampled tokens"
    if not np.isfinite(np.frombuffer(row.teacher, np.float32)).all():
        return "the teachers' log-probabilities must be finite"
    if row.top_k and (complaint := _top_k_complaint(row)):
        return complaint
    return None if row.episode is None else episodes.complaint(row.episode, row.runs)


def _top_k_complaint(row: Row) -> str | None:
    """Rows of K ids and K + 1 log-probabilities, four bytes each."""
    size, count = len(row.top_k), row.sampled_tokens if row.teacher else 0
    words, uneven = divmod(size, 4 * count) if count else (0, size)
    if uneven or words < 3 or not words % 2:
        return f"{size} bytes of a teacher's likeliest tokens are not those of its {count} judged tokens"
    found = np.frombuffer(row.top_k, np.int32).reshape(count, words)
    if found[:, : words // 2].min() < 0:
        return "the ids of a teacher's likeliest tokens must not be negative"
    if not np.isfinite(found[:, words // 2 :].view(np.float32)).all():
        return "the log-probabilities of a teacher's likeliest tokens must be finite"
    return None


def pack(group: int, sample: int, texts: Texts, numbers: Numbers, lists: tuple[bytes, bytes, bytes]) -> bytes:
    """`lists`: tokens, log-probabilities and versions, four bytes an item and of equal length."""
    prompt, engine, precision, finish = (text.encode() for text in texts)
    p, e, q, f, size = len(prompt), len(engine), len(precision), len(finish), len(lists[0])
    shape, n = _shape(p, e, q, f, size), size // 4
    words = (0, p, prompt, 0, e, engine, 0, q, precision, 0, f, finish)
    items = (0, n, lists[0], 0, n, lists[1], 0, n, lists[2])
    return shape.head + shape.body.pack(group, sample, *words, *numbers, *items)


def unpack(payload: bytes) -> Fields | None:
    """None for bytes that `pack` has not written; what they mean is not checked."""
    if len(payload) < HEAD_SIZE:
        return None
    sizes = SIZES.unpack_from(payload)
    if min(sizes) < 0 or sum(sizes) > len(payload) or sizes[-1] % 4:
        return None
    shape = _shape(*sizes)
    if len(payload) != HEAD_SIZE + shape.body.size or not payload.startswith(shape.head):
        return None
    found = shape.body.unpack_from(payload, HEAD_SIZE)
    if (*found[2:14:3], *found[3:14:3], *found[17::3], *found[18::3]) != shape.lengths:
        return None
    try:
        prompt, engine, precision, finish = [text.decode() for text in found[4:14:3]]
    except UnicodeDecodeError:
        return None
    tokens, logprobs, versions = found[19::3]
    return Fields(
        group=found[0],
        sample=found[1],
        texts=(prompt, engine, precision, finish),
        numbers=(found[14], found[15], found[16]),
        tokens=np.frombuffer(tokens, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32),
    )


@lru_cache(SHAPES)
def _shape(prompt: int, engine: int, precision: int, finish: int, items: int) -> _Shape:
    """Buffers lie one behind the other, from multiples of eight; a validity bitmap that is not there has length 0."""
    texts = (prompt, engine, precision, finish)
    lengths = [0, 8, 0, 4]
    for text in texts:
        lengths += (0, 8, text)
    lengths += (0, 8, 0, 8, 0, 8, *(0, 8, 0, items) * 3)
    buffers: list[int] = []
    place = 0
    for length in lengths:
        buffers += (place, length)
        place += length + -length % 8
    nodes = (1, 0) * 9 + (1, 0, items // 4, 0) * 3
    prefix = PREFIX.pack(BEFORE_BODY_LENGTH, place, AFTER_BODY_LENGTH)
    head = b"".join((prefix, BUFFERS.pack(*buffers), NODES.pack(len(nodes) // 2, *nodes)))
    words, lists = "".join(map(_with_offsets, texts)), 3 * _with_offsets(items)
    return _Shape(head, struct.Struct(f"<qi4x{words}3d{lists}"), (*(0,) * 4, *texts, *(0,) * 3, *(items // 4,) * 3))


def _with_offsets(size: int) -> str:
    return f"ii{size}s{-size % 8}x"
