"""S9: whatever bytes lie in a segment, reading them ends in an error or in data: no crash, no memory taken on trust."""

import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.journal import Admitted, Begun, Committed, Delivered, Dropped, Renewed
from asyncrl.buffer.log import FRAME, Header, new_digest, pack_footer, pack_head
from asyncrl.buffer.reader import read_deliveries, read_run, verify
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Buffer
from asyncrl.data import arrow, untrusted
from asyncrl.data.untrusted import read_table
from asyncrl.drafting import windows
from asyncrl.errors import AsyncRLError
from asyncrl.types import Segment, Slot, Trajectory

ROOM = 1 << 30
"""Bytes of address space that reading may take; the lengths in hostile bytes go far beyond."""
pa.allocate_buffer(1)  # with the first one Arrow reserves a gigabyte of address space, and uses none of it
EXAMPLES = settings(max_examples=150, deadline=None)

GOOD = arrow.encode(
    Trajectory(
        slot=Slot(0, 0),
        prompt="1+1=",
        segments=(Segment.given([1, 2, 3]), Segment.sampled([4, 5], [-0.5, -1.0], 0)),
        reward=1.0,
        finish="stop",
        started=1.0,
        finished=2.0,
        engine="native",
        precision="fp32",
    )
)
TERMS = Begun(group_size=2, groups_per_step=1, max_staleness=1)
small = st.integers(-2, 3)
history = st.lists(
    st.one_of(
        st.builds(Admitted, small, small, st.floats(), st.integers(-1, 1 << 62)),
        st.builds(Renewed, small, st.floats()),
        st.builds(Dropped, small, st.text(max_size=3), small, small),
        st.builds(Delivered, small, st.lists(small, max_size=3).map(tuple)),
        st.builds(Committed, small),
    ),
    max_size=8,
)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Other bytes altogether, or the good ones with some changed, cut off or made into a large number."""
    match draw(st.sampled_from(["random", "changed", "cut", "huge"])):
        case "random":
            return draw(st.binary(max_size=300))
        case "cut":
            return good[: draw(st.integers(0, len(good)))]
        case "changed":
            places = st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255))
            data = bytearray(good)
            for place, value in draw(st.lists(places, min_size=1, max_size=4)):
                data[place] = value
            return bytes(data)
        case _:
            place, width = draw(st.integers(0, len(good) - 8)), draw(st.sampled_from([4, 8]))
            return good[:place] + (2 ** (8 * width - 1) - 1).to_bytes(width, "little") + good[place + width :]


def sealed(schema: bytes, *content: bytes) -> bytes:
    """A segment whose every checksum is right: what somebody can write who knows the format."""
    header = Header(schema, "run", 0).pack()
    digest, body = new_digest(header), b""
    for sequence, payload in enumerate(content):
        head = pack_head(sequence, bytes(16), payload)
        digest.update(head)
        body += head + payload
    return header + body + pack_footer(len(content), digest.digest())


def survives(read: Callable[[], Any]) -> None:
    """An error of the kinds that we raise, or a result; a MemoryError is neither."""
    with suppress(AsyncRLError, ValueError):
        read()


def read_all(directory: Path) -> None:
    verify(directory)
    survives(lambda: list(read_run(directory)))
    survives(lambda: read_deliveries(directory))
    survives(lambda: reopened(directory).close())


def reopened(directory: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(
        directory,
        "run",
        Buffer(),
        group_size=TERMS.group_size,
        groups_per_step=TERMS.groups_per_step,
        max_staleness=TERMS.max_staleness,
        group_timeout_s=1.0,
        restore_step=0,
    )


@EXAMPLES
@given(damaged(sealed(payloads.SCHEMA_HASH, GOOD, GOOD)), st.sampled_from([".seg", ".open"]))
def test_s9_damaged_segments(content: bytes, suffix: str) -> None:
    with TemporaryDirectory() as place:
        (Path(place) / f"{payloads.STEM}-000000000000000{suffix}").write_bytes(content)
        read_all(Path(place))


@EXAMPLES
@given(damaged(GOOD), damaged(journal.encode(Admitted(0, 0, 1.0, 100))), history)
def test_s9_hostile_segments_with_right_checksums(payload: bytes, record: bytes, course: list[journal.Record]) -> None:
    entries = [journal.encode(entry) for entry in (TERMS, *course)]
    with TemporaryDirectory() as place:
        (Path(place) / f"{payloads.STEM}-000000000000000.seg").write_bytes(sealed(payloads.SCHEMA_HASH, GOOD, payload))
        for content in ([*entries, record], entries):
            (Path(place) / f"{journal.STEM}-000000000000000.seg").write_bytes(sealed(journal.SCHEMA_HASH, *content))
            read_all(Path(place))


@EXAMPLES
@given(damaged(GOOD))
def test_s9_payloads(payload: bytes) -> None:
    survives(lambda: arrow.decode(payload))
    survives(lambda: arrow.read_table([payload]))
    survives(lambda: windows.decode(payload))


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_s9_compressed_payloads_are_refused_before_they_grow(codec: str) -> None:
    """A few bytes may say that they unpack to any length."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(GOOD), arrow.SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow.SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    payload = messages.read_next_message().serialize().to_pybytes()
    assert pa.ipc.read_record_batch(pa.py_buffer(payload), arrow.SCHEMA).num_rows == 1
    with pytest.raises(ValueError, match="compressed"):
        arrow.decode(payload)


def test_s9_a_length_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    head = FRAME.pack(2**32 - 2, 0, 0, bytes(16))
    path = tmp_path / f"{payloads.STEM}-000000000000000.seg"
    path.write_bytes(Header(payloads.SCHEMA_HASH, "run", 0).pack() + head)
    with path.open("ab") as file:
        file.truncate(2**32 + 2**20)  # sparse: the bytes it claims are there
    assert verify(tmp_path).bad == [f"{path} is damaged at offset 104: a frame of 4294967294 bytes cannot be there"]


def test_s9_figures_of_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    pq.write_table(pa.table({"step": list(range(50)), "reward": [0.5] * 50, "empty": [None] * 50}), path)
    good = path.read_bytes()
    assert read_table(path).num_rows == 50

    @EXAMPLES
    @given(damaged(good))
    def fuzz(content: bytes) -> None:
        path.write_bytes(content)
        survives(lambda: read_table(path))

    fuzz()


def test_s9_figures_that_unpack_to_much_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.parquet"
    pq.write_table(pa.table({"step": pa.array([0] * 1_000_000)}), path)
    assert path.stat().st_size < 1 << 13
    monkeypatch.setattr(untrusted, "MAX_BYTES", 1 << 22)
    with pytest.raises(AsyncRLError, match="would take 8"):
        read_table(path)
