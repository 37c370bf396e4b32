"""The checker: silent over sound directories, and each kind of damage or misdeed is found and named."""

import os
import random
import shutil
from collections import deque
from pathlib import Path

import msgspec
import pytest

from asyncrl.buffer import journal
from asyncrl.buffer.consumed import EarlierGroups
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
)
from asyncrl.buffer.log import Log, Scan, segment_paths
from asyncrl.buffer.payloads import SCHEMA_HASH, STEM, open_log, pack_slot
from asyncrl.buffer.reader import read_run
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Buffer
from asyncrl.data.arrow import encode
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.audit.accounts import Accounts
from asyncrl.observe.audit.audit import Audit, audit
from asyncrl.observe.audit.evidence import DamageError
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.types import Segment, Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload, trajectory

MANIFEST = TrainingManifest(step=1, samples_trained=4, consumed=((0, 1),))
"""Of the small run's first step."""


def small_run(directory: Path, *, close: bool = True) -> TrajectoryBuffer:
    """Groups of 2, 2 groups a step: step 0 trained on 0 and 1, group 2 dropped, group 3 waits, group 4 in flight."""
    buffer = open_buffer(directory, max_staleness=2)
    for group in range(5):
        assert isinstance(buffer.admit(0.0), Ticket)
        if group in (0, 1, 3):
            buffer.append_many([payload(group, 0), payload(group, 1)])
    buffer.append(payload(2, 1))
    buffer.take(2)
    buffer.commit(0)
    buffer.advance(1)
    buffer.fail(Slot(2, 0), "reward_error", tokens=3)
    if close:
        buffer.close()
    return buffer


def check(directory: Path, manifest: TrainingManifest = MANIFEST) -> Audit:
    return audit(directory, "test-run", {"step-1": manifest})


def violation(directory: Path, manifest: TrainingManifest = MANIFEST) -> str:
    found = check(directory, manifest)
    assert len(found.violations) == 1, found.violations
    return found.violations[0]


def write_records(directory: Path, *entries: Record) -> None:
    """More of the journal, as a program that errs would write it: checksums and all."""
    log = Journal(directory, run_id="test-run", sync=False)
    log.recover()
    log.write(*entries)
    log.close()


def write_payloads(directory: Path, *payloads: tuple[Slot, bytes]) -> None:
    log = open_log(directory, "test-run", Buffer())
    for _ in log.recover():
        pass
    log.append([(pack_slot(slot), data) for slot, data in payloads])
    log.seal()


def test_a_sound_directory_balances_by_id(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    found = check(tmp_path / "run")
    assert found.sound, found.violations
    assert (found.ledger.leased, found.ledger.in_flight, found.ledger.buffered, found.ledger.consumed) == (10, 2, 2, 4)
    assert found.ledger.dropped == {"reward_error": 1, "group_incomplete": 1}
    assert (found.steps, found.log.frames, found.log.torn_bytes) == (1, 7, 0)


def test_a_killed_run_is_sound_and_its_unfinished_write_is_counted(tmp_path: Path) -> None:
    small_run(tmp_path / "run", close=False)
    with next((tmp_path / "run").glob("trajectories-*.open")).open("ab") as file:
        file.write(b"unfinished")
    found = check(tmp_path / "run")
    assert found.sound, found.violations
    assert found.log.torn_bytes == 10


def test_a_run_that_is_resumed_with_parts_in_its_rewards_is_sound(tmp_path: Path) -> None:
    """Its log holds answers of both kinds, in one file."""
    small_run(tmp_path / "killed", close=False)
    shutil.copytree(tmp_path / "killed", tmp_path / "run")
    buffer = open_buffer(tmp_path / "run", max_staleness=2, restore_step=1)
    buffer.advance(1)
    for sample, parts in enumerate(({"right": 0.0}, {"right": 0.75, "format": 0.25})):
        buffer.append(encode(msgspec.structs.replace(trajectory(4, sample), parts=parts)))
    buffer.take(2)
    buffer.close()
    found = check(tmp_path / "run")
    assert found.sound, found.violations
    stored = {t.slot: t.parts for t in read_run(tmp_path / "run")}
    assert (len(stored), stored[Slot(4, 1)], stored[Slot(3, 1)]) == (9, {"right": 0.75, "format": 0.25}, {})


def test_every_value_of_every_byte_of_a_sealed_segment_but_its_own_is_found(tmp_path: Path) -> None:
    """Exhaustive: 255 wrong values for each byte of header, frames and footer."""
    log = Log(tmp_path, "t", run_id="run", schema=SCHEMA_HASH, segment_bytes=1 << 20, sync=False)
    assert list(log.recover()) == []
    log.append([(pack_slot(Slot(0, 0)), b"one"), (pack_slot(Slot(0, 1)), b"three")])
    log.seal()
    [path] = segment_paths(tmp_path, "t")
    good = path.read_bytes()
    found = 0
    with path.open("r+b", buffering=0) as file:
        for offset, right in enumerate(good):
            for wrong in range(256):
                if wrong != right:
                    os.pwrite(file.fileno(), bytes([wrong]), offset)
                    found += is_damaged(path)
            os.pwrite(file.fileno(), bytes([right]), offset)
    assert found == 255 * len(good)
    assert not is_damaged(path)


def is_damaged(path: Path) -> bool:
    try:
        deque(Scan(path, schema=SCHEMA_HASH), maxlen=0)
    except CorruptSegmentError:
        return True
    return False


@pytest.mark.parametrize("stem", [STEM, journal.STEM])
def test_the_checker_finds_flips_all_over_a_sealed_file(tmp_path: Path, stem: str) -> None:
    buffer = open_buffer(tmp_path / "run", group_size=1)
    buffer.admit(0.0)
    buffer.append(payload(0, 0))
    buffer.close()
    [path] = segment_paths(tmp_path / "run", stem)
    good = path.read_bytes()
    for offset in range(0, len(good), 7):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :])
        assert f"{path.name} is damaged at offset" in audit(tmp_path / "run", "test-run", {}).violations[0]
    path.write_bytes(good)
    assert audit(tmp_path / "run", "test-run", {}).sound


def test_a_flip_in_an_open_segment_is_found_unless_it_is_in_the_last_frame(tmp_path: Path) -> None:
    """There a torn write looks the same; before it, cutting would lose what was acknowledged."""
    small_run(tmp_path / "run", close=False)
    [path] = (tmp_path / "run").glob("trajectories-*.open")
    good = path.read_bytes()
    last = good.rfind((6).to_bytes(8, "little")) - 8
    for offset in range(0, last, 61):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :])
        assert f"{path.name} is damaged at offset" in violation(tmp_path / "run")


MISDEEDS: list[tuple[Record, str]] = [
    (Delivered(1, (0,)), "group 0 was delivered before: it would be trained on twice"),
    (Delivered(1, (2,)), "group 2 was dropped before, for reward_error"),
    (Delivered(1, (4,)), "group 4 is delivered without its samples [0, 1]"),
    (Delivered(1, (9,)), "group 9 was never admitted"),
    (Delivered(2, (3,)), "groups (3,) are delivered for step 2 in step 1"),
    (Committed(1), "step 1 is committed in step 1 with 0 of 2 groups"),
    (Admitted(7, 1, 0.0, 10), "group 7 is admitted where 5 comes next"),
    (Admitted(5, 2, 0.0, 10), "group 5 is admitted under version 2; 1 is served"),
    (Dropped(0, "timeout"), "group 0 was delivered before"),
    (Dropped(2, "timeout"), "group 2 was dropped before"),
    (Late(3, 0, 5), "its group was not dropped"),
    (Late(2, 0, 5), "is late for the second time"),
    (Advanced(2), "version 2 is served after 1, with 1 steps committed"),
    (Limited(3), "a bound of 3 is beyond that of the run, 2"),
]


@pytest.mark.parametrize(("misdeed", "said"), MISDEEDS, ids=lambda value: type(value).__name__)
def test_a_record_that_cannot_follow_is_found_with_its_place(tmp_path: Path, misdeed: Record, said: str) -> None:
    small_run(tmp_path / "run")
    write_records(tmp_path / "run", misdeed)
    text = violation(tmp_path / "run")
    assert said in text
    assert text.startswith("ledger-000000000000010.seg offset 104: ")


def test_a_record_that_cannot_be_read_is_found_with_its_location(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    log = Log(
        tmp_path / "run",
        journal.STEM,
        run_id="test-run",
        schema=journal.SCHEMA_HASH,
        segment_bytes=1 << 20,
        sync=False,
    )
    assert len(list(log.recover())) == 10
    log.append([(journal.NO_SLOT, b"\x92\xa7Unknown\x03")])
    log.seal()
    text = violation(tmp_path / "run")
    assert text.startswith("ledger-000000000000010.seg offset 104: the record cannot be read: not a record")


def test_drop_reasons_of_other_releases_are_counted(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    write_records(tmp_path / "run", Dropped(3, "lost_in_space"), Dropped(4, "stage:dull", 1))
    found = check(tmp_path / "run")
    assert found.sound
    assert found.ledger.dropped == {
        "reward_error": 1, "group_incomplete": 2, "lost_in_space": 2, "stage:dull": 1
    }  # fmt: skip


def test_a_group_that_is_too_old_is_found(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    write_payloads(tmp_path / "run", *((Slot(4, i), payload(4, i)) for i in range(2)))
    steps = [Delivered(1, (3,)), Delivered(1, (4,)), Committed(1), Advanced(2)]
    later = [Admitted(group, 1, 0.0, 10) for group in (5, 6, 7, 8)]
    write_records(tmp_path / "run", *later, *steps, Delivered(2, (5, 6)), Committed(2), Advanced(3), Delivered(3, (7,)))
    rows = [
        (Slot(group, i), payload(group, i, version=0 if group == 7 else 1)) for group in range(5, 8) for i in (0, 1)
    ]
    write_payloads(tmp_path / "run", *rows)
    assert "group 7 holds a token of version 0 and is delivered at version 3" in violation(tmp_path / "run")


def test_a_slot_that_is_stored_twice_or_has_no_ticket_is_found(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    write_payloads(tmp_path / "run", (Slot(3, 1), payload(3, 1)))
    assert violation(tmp_path / "run").endswith("group 3 sample 1 is stored twice")
    write_payloads(tmp_path / "other", (Slot(8, 0), payload(8, 0)))
    assert violation(tmp_path / "other").endswith("group 8 sample 0 is stored, but no ticket was issued for it")


def test_versions_that_go_back_and_a_frame_of_another_slot_are_found(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    segments = (Segment.given([1]), Segment.sampled([2], [-1.0], 1), Segment.sampled([3], [-1.0], 0))
    write_payloads(tmp_path / "run", (Slot(4, 0), encode(msgspec.structs.replace(trajectory(4, 0), segments=segments))))
    assert violation(tmp_path / "run").endswith("group 4 sample 0 goes back in versions: [1, 0]")
    write_payloads(tmp_path / "other", (Slot(4, 0), payload(4, 1)))
    assert "holds the trajectory of" in violation(tmp_path / "other")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (TrainingManifest(step=1, samples_trained=4, consumed=((0, 0),)), "step-1: groups [1] are in its manifest or"),
        (TrainingManifest(step=1, samples_trained=4, consumed=((0, 2),)), "step-1: groups [2] are in its manifest or"),
        (TrainingManifest(step=1, samples_trained=6, consumed=((0, 1), (1, 1))), "names a group twice"),
        (TrainingManifest(step=1, samples_trained=5, consumed=((0, 1),)), "5 samples are not the 4 of its groups"),
        (TrainingManifest(step=2, samples_trained=4, consumed=((0, 1),)), "holds 2 steps, but the journal commits 1"),
    ],
)
def test_a_checkpoint_that_disagrees_with_the_journal_is_found(
    tmp_path: Path, manifest: TrainingManifest, said: str
) -> None:
    small_run(tmp_path / "run")
    assert said in violation(tmp_path / "run", manifest)


def test_a_lost_file_is_found(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", segment_bytes=1)
    for group in range(4):
        buffer.admit(0.0)
        buffer.append_many([payload(group, 0), payload(group, 1)])
    buffer.close()
    files = segment_paths(tmp_path / "run", STEM)
    assert audit(tmp_path / "run", "test-run", {}).sound
    files[1].unlink()
    assert "but 2 comes next: a file is lost" in audit(tmp_path / "run", "test-run", {}).violations[0]
    files[0].unlink()
    assert "are gone, but a consumer needs those from 0 on" in audit(tmp_path / "run", "test-run", {}).violations[0]
    for path in segment_paths(tmp_path / "run", journal.STEM):
        path.unlink()
    assert "holds no journal, but there are checkpoints" in violation(tmp_path / "run")


def test_a_summary_that_disagrees_with_the_journal_is_found(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    ledger = msgspec.to_builtins(check(tmp_path / "run").ledger)
    good = {"status": "ok", "steps": 1, "samples_trained": 4, "ledger": ledger}
    for change, said in (
        ({"steps": 2}, "counts 2 steps, the journal 1"),
        ({"samples_trained": 3}, "counts 3 samples"),
        ({"ledger": ledger | {"consumed": 3}}, "summary.json ends with"),
    ):
        assert said in audit(tmp_path / "run", "test-run", {}, good | change).violations[0]
        assert audit(tmp_path / "run", "test-run", {}, good | change | {"status": "failed"}).sound
    assert audit(tmp_path / "run", "test-run", {}, good).sound


def test_any_record_left_out_or_doubled_is_found_or_harmless(tmp_path: Path) -> None:
    """A journal with right checksums but one record too few or too many: only what changes no id may pass."""
    small_run(tmp_path / "run")
    [path] = segment_paths(tmp_path / "run", journal.STEM)
    entries = [journal.decode(frame.payload) for frame in Scan(path, schema=journal.SCHEMA_HASH)]
    passed: list[str] = []
    for number, entry in enumerate(entries):
        for change in (entries[:number] + entries[number + 1 :], entries[: number + 1] + entries[number:]):
            path.unlink()
            write_records(tmp_path / "run", *change)
            if check(tmp_path / "run").sound:
                passed.append(type(entry).__name__)
            [path] = segment_paths(tmp_path / "run", journal.STEM)
    assert set(passed) <= {"Dropped", "Advanced", "Admitted"}, "the last drop, version or lease may be missing"
    assert len(passed) <= 3


def test_random_damage_never_ends_in_a_crash_of_the_checker(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    rng = random.Random(5)
    files = [*segment_paths(tmp_path / "run", STEM), *segment_paths(tmp_path / "run", journal.STEM)]
    for _ in range(200):
        path = rng.choice(files)
        good = path.read_bytes()
        bad = bytearray(good)
        for _ in range(rng.randint(1, 20)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bad[: rng.randint(1, len(bad))])
        assert not check(tmp_path / "run").sound or path.read_bytes() == good
        path.write_bytes(good)


def test_the_oldest_groups_of_a_manifest_are_proven_by_their_digest(tmp_path: Path) -> None:
    small_run(tmp_path)
    right = TrainingManifest(step=1, samples_trained=4, consumed=((1, 1),), earlier=EarlierGroups.of([0], 1))
    assert check(tmp_path, right).sound
    wrong = TrainingManifest(step=1, samples_trained=4, consumed=((1, 1),), earlier=EarlierGroups.of([2], 1))
    assert "step-1: its manifest counts 1 groups below 1, with the digest" in violation(tmp_path, wrong)


@pytest.mark.parametrize("pruned", [False, True])
def test_the_ledger_must_agree_with_the_ids_of_a_pruned_run_too(pruned: bool) -> None:
    accounts = Accounts(Begun(2, 1, 1), {}, pruned=pruned)
    accounts.follow(Admitted(0, 0, 1e9, 64))
    accounts._ledger.apply(Dropped(0, "reward_error", 0, 3))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(DamageError, match="the sums are"):
        accounts.follow(Admitted(1, 0, 1e9, 64))
