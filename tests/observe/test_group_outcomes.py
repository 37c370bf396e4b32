"""The journal, read as arrays: the same figures as record by record, whatever their size and wherever it ends."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer import journal
from asyncrl.buffer.journal import (
    Admitted,
    Advanced,
    Begun,
    Committed,
    Delivered,
    Dropped,
    Journal,
    Late,
    Limited,
    Record,
    Renewed,
)
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.query import logs
from asyncrl.observe.query.group_outcomes import GroupOutcomes, read_group_outcomes, read_records
from asyncrl.observe.query.logs import open_files
from tests.observe.test_tables import ANY_FILE
from tests.support.recorded_runs import RUN_ID, write_journal

EDGES = (0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**62)
"""Around which msgpack takes another byte."""
numbers = st.sampled_from(EDGES) | st.integers(0, 2**62)
records = st.one_of(
    st.builds(Admitted, numbers, numbers, st.floats(allow_nan=False), numbers),
    st.builds(Renewed, numbers, st.floats(allow_nan=False)),
    st.builds(Dropped, numbers, st.text(), st.integers(-1, 9), numbers),
    st.builds(Late, numbers, st.integers(0, 9), numbers),
    st.builds(Delivered, numbers, st.lists(numbers, max_size=3).map(tuple)),
    st.builds(Committed, numbers),
    st.builds(Advanced, numbers),
    st.builds(Limited, st.integers(0, 9)),
)


def read(directory: Path) -> GroupOutcomes:
    return read_group_outcomes(open_files(directory, journal.STEM, journal.SCHEMA_HASH))


@given(made=st.lists(records, max_size=30), seal=st.booleans(), stride=st.sampled_from([64, 300, 1 << 17]))
@ANY_FILE
def test_any_record_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[Record], seal: bool, stride: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    written = Journal(directory, run_id=RUN_ID, sync=False)
    written.recover()
    written.write(Begun(2, 2, 1), *made)
    if seal:
        written.close()
    (file,) = open_files(directory, journal.STEM, journal.SCHEMA_HASH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "STRIDE", stride)
        versions, others = read_records(file)
    assert versions.tolist() == [record.version for record in made if isinstance(record, Admitted)]
    assert others == [Begun(2, 2, 1), *(record for record in made if not isinstance(record, Admitted))]


def test_takes_are_counted_within_their_step(tmp_path: Path) -> None:
    delivered = [Delivered(1, (2, 0)), Delivered(0, (1,)), Delivered(1, (4,)), Delivered(0, (5, 3))]
    write_journal(tmp_path, [*(Admitted(group, 300 + group, 1e9, 64) for group in range(7)), *delivered])
    found = read(tmp_path)
    assert found.versions.tolist() == list(range(300, 307))
    assert found.steps.tolist() == [1, 0, 1, 0, 1, 0, -1]
    assert found.takes.tolist() == [0, 0, 0, 1, 1, 1, -1]


def test_why_groups_were_dropped(tmp_path: Path) -> None:
    dropped = [Dropped(2, "timeout"), Dropped(0, "reward_error", 1), Dropped(3, "timeout")]
    write_journal(tmp_path, [*(Admitted(group, 0, 1e9, 64) for group in range(4)), *dropped])
    found = read(tmp_path)
    assert [found.reasons[drop] if drop >= 0 else None for drop in found.drops] == [
        "reward_error",
        None,
        "timeout",
        "timeout",
    ]
    assert found.failed.tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize("record", [Delivered(0, (1,)), Delivered(0, (-1,)), Dropped(1, "timeout")])
def test_groups_that_nobody_admitted_are_refused(tmp_path: Path, record: Record) -> None:
    write_journal(tmp_path, [Admitted(0, 0, 1e9, 64), record])
    with pytest.raises(CorruptSegmentError, match="asyncrl check"):
        read(tmp_path)


def test_no_number_where_one_belongs_is_refused(tmp_path: Path) -> None:
    write_journal(tmp_path, [Admitted(0, 1, 1e9, 64)])
    (path,) = tmp_path.glob("*.seg")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"Admitted\x00\x01", b"Admitted\x00\xc0"))
    with pytest.raises(CorruptSegmentError, match="no number"):
        read(tmp_path)


def test_before_the_first_record(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert (found.size, found.committed, len(found.versions)) == (0, -1, 0)
    assert found.steps.dtype == np.int64
