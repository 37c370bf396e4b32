import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.payloads import SCHEMA_HASH
from asyncrl.data import arrow
from asyncrl.data.arrow import PARTED, RANKED, ROUTED, SCHEMA, TAUGHT, decode, encode, read_row, read_table
from asyncrl.data.reward_parts import NAME
from asyncrl.types import GIVEN, Segment, Slot, Trajectory
from tests.support.buffer_stores import payload, trajectory

int32 = st.integers(0, 2**31 - 1)
logprob = st.floats(width=32, allow_nan=False, allow_infinity=False)
number = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(st.lists(int32, min_size=1, max_size=20))
    version = draw(st.integers(GIVEN, 5))
    if version == GIVEN:
        return Segment.given(tokens)
    return Segment.sampled(tokens, draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens))), version)


trajectories = st.builds(
    Trajectory,
    slot=st.builds(Slot, st.integers(0, 2**63 - 1), int32),
    prompt=st.text(),
    segments=st.lists(segments(), min_size=1, max_size=6).map(tuple),
    reward=number,
    finish=st.sampled_from(["stop", "length", "abort"]),
    started=number,
    finished=number,
    engine=st.text(),
    precision=st.text(),
    parts=st.dictionaries(st.from_regex(NAME, fullmatch=True), number, max_size=3),
)


def one_segment_per_run(item: Trajectory) -> bool:
    return all(a.version != b.version for a, b in zip(item.segments, item.segments[1:], strict=False))


@given(trajectories.filter(one_segment_per_run))
def test_round_trip_is_exact(item: Trajectory) -> None:
    assert decode(encode(item)) == item


@given(trajectories)
def test_neighbours_of_one_version_become_one_segment_and_no_token_changes(item: Trajectory) -> None:
    back = decode(encode(item))
    assert one_segment_per_run(back)
    assert np.array_equal(back.tokens, item.tokens)
    assert np.array_equal(back.versions, item.versions)
    assert back.logprobs.tobytes() == item.logprobs.tobytes()
    row = read_row(encode(item))
    assert (row.sampled_tokens, row.oldest_version) == (item.sampled_tokens, item.oldest_version)


without_parts = trajectories.map(lambda item: msgspec.structs.replace(item, parts={}))


def written_by_arrow(item: Trajectory) -> bytes:
    row = {
        "group": item.slot.group,
        "sample": item.slot.sample,
        "prompt": item.prompt,
        "engine": item.engine,
        "precision": item.precision,
        "finish": item.finish,
        "reward": item.reward,
        "started": item.started,
        "finished": item.finished,
        "tokens": item.tokens,
        "logprobs": item.logprobs,
        "versions": item.versions,
    }
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA).serialize().to_pybytes()


@given(without_parts)
def test_payloads_are_what_arrow_writes_and_both_ways_to_read_them_agree(item: Trajectory) -> None:
    payload = encode(item)
    assert payload == written_by_arrow(item)
    found, arrows = arrow.unpack(payload), arrow.fields(arrow.read_batch(payload))
    assert found is not None
    assert [np.array_equal(mine, its) for mine, its in zip(found, arrows, strict=True)] == [True] * len(found)


@given(without_parts, st.data())
def test_a_payload_with_another_byte_reads_as_arrow_reads_it(item: Trajectory, data: st.DataObject) -> None:
    payload = bytearray(encode(item))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if (found := arrow.unpack(bytes(payload))) is not None:
        arrows = arrow.fields(arrow.read_batch(bytes(payload)))
        assert found[:3] == arrows[:3]
        assert np.array_equal(found.numbers, arrows.numbers, equal_nan=True)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[4:7], arrows[4:7], strict=True))


def test_table_has_the_written_columns() -> None:
    table = read_table([payload(7, 0, version=3, tokens=2), payload(7, 1, version=4, tokens=1)])
    assert table.schema.names == PARTED.names
    assert table.column("group").to_pylist() == [7, 7]
    assert table.column("tokens").to_pylist() == [[7, 0, 0, 1], [7, 1, 0]]
    assert table.column("versions").to_pylist() == [[-1, -1, 3, 3], [-1, -1, 4]]
    assert table.column("logprobs").to_pylist() == [[0, 0, -0.25, -0.25], [0, 0, -0.25]]


def test_an_answer_without_parts_is_stored_as_before_there_were_any() -> None:
    """So a directory of those days is read, resumed and checked, and where there are no parts they cost nothing."""
    assert SCHEMA_HASH.hex() == "c1b9525a0205b0650fe274feebfbe2a1"
    assert len(SCHEMA) == 12
    plain = payload(3, 1)
    assert pa.ipc.read_record_batch(pa.py_buffer(plain), SCHEMA).serialize().to_pybytes() == plain
    assert decode(plain).parts == {}


def routed() -> Trajectory:
    """Seven tokens, so that six have routes, of two bytes each here."""
    segments = (
        Segment.given([1, 2, 3]),
        Segment.sampled([4, 5], [-1.0, -0.5], 0, bytes(range(8))),
        Segment.given([6]),
        Segment.sampled([7], [-2.0], 1, bytes(range(8, 12))),
    )
    return msgspec.structs.replace(trajectory(3, 1), segments=segments)


@pytest.mark.parametrize("parts", [{}, {"format": 0.5}])
def test_routes_are_a_column_of_bytes_and_go_back_to_their_segments(parts: dict[str, float]) -> None:
    item = msgspec.structs.replace(routed(), parts=parts)
    assert decode(encode(item)) == item
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode(item)), ROUTED)
    assert batch.column("routes").to_pylist() == [bytes(range(12))]
    assert batch.schema.field("routes").type == pa.binary()
    table = read_table([payload(0, 0), encode(item)])
    assert table.column("routes").to_pylist() == [None, bytes(range(12))]


@pytest.mark.parametrize("parts", [{}, {"format": 0.5}])
@pytest.mark.parametrize("of", ["plain", "routed"])
def test_what_teachers_say_is_a_column_of_bytes(parts: dict[str, float], of: str) -> None:
    """Of the sampled tokens alone; rows with and without it lie in one log."""
    said = np.array([-0.5, -1.0, -1.5], np.float32)
    item = routed() if of == "routed" else trajectory(3, 1, tokens=3)
    item = msgspec.structs.replace(item, parts=parts, teacher_logprob_bytes=said.tobytes())
    back = decode(encode(item))
    assert back == item
    assert back.teacher_logprobs.tolist() == said.tolist()
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode(item)), TAUGHT)
    assert batch.column("teacher_logprobs").to_pylist() == [said.tobytes()]
    table = read_table([payload(0, 0), encode(item)])
    assert table.column("teacher_logprobs").to_pylist() == [None, said.tobytes()]
    assert decode(payload(0, 0)).teacher_logprobs.tolist() == [], "a row of before there were teachers"


@pytest.mark.parametrize(
    ("said", "complaint"),
    [([-0.5, -1.0], "8 bytes of the teachers' log-probabilities"), ([-0.5, -1.0, np.nan], "must be finite")],
)
def test_what_teachers_cannot_have_said_is_refused(said: list[float], complaint: str) -> None:
    item = msgspec.structs.replace(routed(), teacher_logprob_bytes=np.array(said, np.float32).tobytes())
    with pytest.raises(ValueError, match=complaint):
        decode(encode(item))


@pytest.mark.parametrize("of", ["plain", "routed"])
def test_the_likeliest_tokens_of_a_teacher_are_a_column_of_bytes(of: str) -> None:
    """Two ids and three log-probabilities for each of three sampled tokens; rows with and without lie in one log."""
    logprobs = np.array([[-0.5, -1.0, -2.0]] * 3, np.float32)
    words = np.concatenate((np.array([[7, 1], [2, 0], [1, 9]], np.int32), logprobs.view(np.int32)), 1)
    item = routed() if of == "routed" else trajectory(3, 1, tokens=3)
    taught = msgspec.structs.replace(item, teacher_logprob_bytes=np.zeros(3, np.float32).tobytes())
    item = msgspec.structs.replace(taught, teacher_top_k_bytes=words.tobytes())
    back = decode(encode(item))
    assert back == item
    assert np.array_equal(back.teacher_top_k, words)
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode(item)), RANKED)
    assert batch.column("teacher_top_k").to_pylist() == [words.tobytes()]
    table = read_table([payload(0, 0), encode(taught), encode(item)])
    assert table.column("teacher_top_k").to_pylist() == [None, None, words.tobytes()]
    assert decode(encode(taught)).teacher_top_k.shape == (3, 0), "a row of before there was distill.top_k"


def _words(*ids: int, last: float = -2.0) -> npt.NDArray[np.int32]:
    """Of three sampled tokens: the ids are of the last one, and `last` its tail."""
    words = np.array([[*ids, *np.full(len(ids) + 1, -1.0, np.float32).view(np.int32)]] * 3, np.int32)
    words[2, -1:] = np.array([last], np.float32).view(np.int32)
    return words


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (_words(1, 2)[:2], "40 bytes of a teacher's likeliest tokens are not those of its 3 judged tokens"),
        (_words(1, 2)[:, 1:], "48 bytes of a teacher's likeliest tokens are not those of its 3 judged tokens"),
        (_words(), "12 bytes of a teacher's likeliest tokens are not those of its 3 judged tokens"),
        (_words(1, -2), "ids of a teacher's likeliest tokens must not be negative"),
        (_words(1, 2, last=np.nan), "log-probabilities of a teacher's likeliest tokens must be finite"),
    ],
)
def test_likeliest_tokens_that_no_teacher_can_have_named_are_refused(
    words: npt.NDArray[np.int32], complaint: str
) -> None:
    said = np.zeros(3, np.float32).tobytes()
    item = msgspec.structs.replace(routed(), teacher_logprob_bytes=said, teacher_top_k_bytes=words.tobytes())
    with pytest.raises(ValueError, match=complaint):
        decode(encode(item))


def test_routes_that_do_not_fit_the_tokens_are_refused_by_name() -> None:
    *others, last = routed().segments
    for segments in (
        (*others, msgspec.structs.replace(last, route_bytes=bytes(3))),
        (*others, Segment.given([7])),
        (Segment.sampled([1], [-1.0], 0, bytes(2)),),
    ):
        with pytest.raises(ValueError, match=r"group 3, sample 1: \d+ bytes of routes are not those of all \d+ tokens"):
            decode(encode(msgspec.structs.replace(routed(), segments=segments)))


def test_a_segment_written_before_there_were_routes_is_read() -> None:
    """Of array-like structs the fields that are missing at the end have their defaults."""
    old = msgspec.msgpack.encode([b"\1\0\0\0", b"\0\0\0\0", 2])
    assert msgspec.msgpack.decode(old, type=Segment) == Segment.sampled([1], [0.0], 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"reward": float("nan")}, "must be finite"),
        ({"finished": float("inf")}, "must be finite"),
        ({"parts": {"format": float("nan")}}, "parts="),
        ({"parts": {"Bad name": 1.0}}, "finite numbers under names"),
        ({"parts": {f"part_{i}": 1.0 for i in range(33)}}, "1 to 32 finite numbers"),
        ({"finish": "tired"}, "finish='tired'"),
        ({"slot": Slot(-1, 0)}, "must not be negative"),
        ({"segments": ()}, "0 tokens"),
        ({"segments": (Segment.sampled([1], [float("nan")], 0),)}, "log-probabilities must be finite"),
        ({"segments": (Segment.sampled([1], [-0.5], -2),)}, "versions must be"),
        ({"segments": (Segment.given([-5]),)}, "token ids"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(encode(msgspec.structs.replace(trajectory(3, 1), **change)))


def test_a_given_token_with_a_log_probability_is_refused() -> None:
    row = {**read_table([payload(0, 0, tokens=1)]).to_pylist()[0], "logprobs": [0.5, 0.0, -0.25]}
    with pytest.raises(ValueError, match="given tokens carry"):
        decode(pa.RecordBatch.from_pylist([row], SCHEMA).serialize().to_pybytes())


def test_nulls_and_uneven_lists_are_refused() -> None:
    nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
    row = read_table([payload(0, 0)]).to_pylist()[0]
    for change in ({"prompt": None}, {"tokens": None}, {"tokens": [1]}, {"versions": [None] * 7}):
        batch = pa.RecordBatch.from_pylist([{**row, **change}], nullable)
        with pytest.raises(ValueError, match=r"holds no nulls|do not match"):
            decode(batch.serialize().to_pybytes())


@given(st.data())
def test_damaged_payloads_never_crash_or_pass_as_something_odd(data: st.DataObject) -> None:
    parts = data.draw(st.sampled_from([{}, {"format": 0.5}]))
    item = data.draw(st.sampled_from([trajectory(1, 1), routed()]))
    raw = bytearray(encode(msgspec.structs.replace(item, parts=parts)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        item = decode(cut)
    except ValueError:
        return
    assert len(item.tokens) == len(item.logprobs) == len(item.versions) > 0
