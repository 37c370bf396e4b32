"""The journal's records on disk: bytes written by hand, so that renaming a class cannot change the format."""

import msgspec
import pytest

from asyncrl.buffer.journal import (
    Admitted,
    Advanced,
    Asked,
    Begun,
    Committed,
    Delivered,
    Dropped,
    Event,
    Failed,
    Folded,
    FoldedGroup,
    Late,
    Limited,
    Measured,
    Record,
    Renewed,
    Stored,
    decode,
    encode,
)
from asyncrl.curriculum.policy import CurriculumState, Known, SourceState
from asyncrl.drop_reasons import DropReason, stage_reason

ONE = b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
"""1.0 in msgpack."""
HALF = b"\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"
WRITTEN: list[tuple[Record, bytes]] = [
    (Begun(2, 4, 1), b"\x94\xa5Begun\x02\x04\x01"),
    (Admitted(3, 1, 1.0, 100), b"\x95\xa8Admitted\x03\x01" + ONE + b"\x64"),
    (Asked(3, 70, -1), b"\x94\xa5Asked\x03\x46\xff"),
    (Measured(2, (70, 3), (0.5, 1.0)), b"\x94\xa8Measured\x02\x92\x46\x03\x92" + HALF + ONE),
    (Renewed(3, 1.0), b"\x93\xa7Renewed\x03" + ONE),
    (Dropped(3, DropReason.TIMEOUT), b"\x95\xa7Dropped\x03\xa7timeout\xff\x00"),
    (Dropped(3, stage_reason("dull"), 1, 7), b"\x95\xa7Dropped\x03\xaastage:dull\x01\x07"),
    (Failed(3, 1, DropReason.REWARD_ERROR, 7), b"\x95\xa6Failed\x03\x01\xacreward_error\x07"),
    (Late(3, 0, 5), b"\x94\xa4Late\x03\x00\x05"),
    (Delivered(2, (3, 4)), b"\x93\xa9Delivered\x02\x92\x03\x04"),
    (Committed(2), b"\x92\xa9Committed\x02"),
    (Advanced(3), b"\x92\xa8Advanced\x03"),
    (Limited(0), b"\x92\xa7Limited\x00"),
    (
        Folded(
            begun=Begun(2, 4, 1),
            step=3,
            version=2,
            next_group=9,
            bound=1,
            latest_expiry=4,
            sample_bytes=100,
            consumed=24,
            drops={"stale": 2},
            waste={"stale": 7},
            waiting=(FoldedGroup(8, 2, 3, 1.0, 100, ((1, "timeout"),), 70),),
            ended=(Dropped(7, "stale"),),
            late=((7, 1),),
            first_sequence=5,
            failed=(Failed(8, 1, "timeout"),),
            curriculum=CurriculumState([SourceState(9, 0.5, 0.5, 1.0, 1.0, {4: None}, {5: None})], {4: Known(2, 0.5)}),
        ),
        b"\xdc\x00\x11\xa6Folded\x94\xa5Begun\x02\x04\x01\x03\x02\x09\x01\x04\x64\x18"
        b"\x81\xa5stale\x02\x81\xa5stale\x07\x91\x97\x08\x02\x03" + ONE + b"\x64\x91\x92\x01\xa7timeout\x46"
        b"\x91\x95\xa7Dropped\x07\xa5stale\xff\x00\x91\x92\x07\x01\x05\x91\x95\xa6Failed\x08\x01\xa7timeout\x00"
        b"\x92\x91\x97\x09" + HALF + HALF + ONE + ONE + b"\x81\x04\xc0\x81\x05\xc0\x81\x04\x92\x02" + HALF,
    ),
]


@pytest.mark.parametrize(("record", "payload"), WRITTEN, ids=lambda value: type(value).__name__)
def test_a_record_is_these_bytes(record: Record, payload: bytes) -> None:
    assert encode(record) == payload
    assert decode(payload) == record


def test_every_record_is_pinned_here() -> None:
    assert {type(record) for record, _ in WRITTEN} == set(Record.__args__)
    assert set(Event.__args__) - set(Record.__args__) == {Stored}
    stored = Stored(3, 1, 100, 7, 1, 0.5)  # not written, but its tag must not become that of a record
    assert encode(stored) == b"\x98\xa6Stored\x03\x01\x64\x07\x01" + HALF + b"\xc2"


def test_records_of_another_release_are_read() -> None:
    assert decode(b"\x93\xa7Dropped\x03\xa4gone") == Dropped(3, "gone"), "fewer fields, and a reason unknown here"
    assert decode(b"\x96\xa7Dropped\x03\xa4gone\x01\x07\x09") == Dropped(3, "gone", 1, 7), "a field unknown here"


@pytest.mark.parametrize("payload", [b"", b"\x92\xa6Stored\x03", b"\x92\xa7Unknown\x03", b"\x93\xa9Committed\xa1x\x01"])
def test_other_bytes_are_no_record(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a record"):
        decode(payload)


def test_a_state_from_before_there_were_curricula_is_read() -> None:
    folded = next(record for record, _ in WRITTEN if isinstance(record, Folded))
    fields = msgspec.msgpack.decode(encode(folded))
    fields.pop()  # the curriculum
    fields[11][0].pop()  # the prompt of the group that waits
    found = decode(msgspec.msgpack.encode(fields))
    assert isinstance(found, Folded)
    assert (found.curriculum, found.waiting[0].prompt) == (None, -1)
    assert found.failed == folded.failed
