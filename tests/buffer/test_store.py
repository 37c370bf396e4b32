"""The buffer on disk: idempotent appends, bounded memory, cursors, refusals, a full disk."""

import stat
import tracemalloc
from pathlib import Path

import pytest

from asyncrl.buffer.ledger import Refusal
from asyncrl.buffer.reader import read_run, verify
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.types import Delivery, LedgerCounts, Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload, trajectory
from tests.support.full_disk import file_size_limit


def admit(buffer: TrajectoryBuffer, now: float = 0.0) -> Ticket:
    ticket = buffer.admit(now)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def generate(buffer: TrajectoryBuffer, ticket: Ticket) -> None:
    receipts = buffer.append_many([payload(ticket.group, i, ticket.version) for i in ticket.samples])
    assert [receipt.status for receipt in receipts] == ["stored"] * len(ticket.samples)


def train_step(buffer: TrajectoryBuffer, step: int) -> Delivery:
    while not isinstance(ticket := buffer.admit(0.0), Refusal):
        generate(buffer, ticket)
    delivery = buffer.take(max_groups=2, min_groups=2)
    assert delivery is not None
    buffer.commit(step)
    buffer.advance(step + 1)
    return delivery


@pytest.mark.parametrize("durability", ["memory", "process", "disk"])
def test_a_trajectory_goes_through_once(tmp_path: Path, durability: str) -> None:
    buffer = open_buffer(tmp_path / "b", durability=durability)
    first, second = admit(buffer), admit(buffer)
    assert buffer.append(payload(first.group, 1)).status == "stored"
    assert buffer.append(payload(first.group, 1, tokens=9)).status == "duplicate"
    assert buffer.take(2) is None
    again = buffer.append_many([payload(0, 0), payload(0, 0, tokens=9), payload(1, 0), payload(1, 1)])
    assert [receipt.status for receipt in again] == ["stored", "duplicate", "stored", "stored"]
    delivery = buffer.take(max_groups=1)
    assert delivery == Delivery(step=0, groups=(first.group,))
    assert buffer.read(delivery) == [payload(0, 0), payload(0, 1)]
    assert buffer.append(payload(0, 0)).status == "duplicate", "delivered"
    rest = buffer.take(2)
    assert rest == Delivery(step=0, groups=(second.group,))
    assert buffer.ledger() == LedgerCounts(leased=4, in_flight=0, buffered=4, consumed=0, dropped={})
    with pytest.raises(ValueError, match="commit it before taking more"):
        buffer.take(1)
    buffer.commit(0)
    buffer.commit(0)
    assert buffer.ledger() == LedgerCounts(leased=4, in_flight=0, buffered=0, consumed=4, dropped={})
    assert buffer.append(payload(0, 0)).status == "duplicate", "consumed"
    with pytest.raises(ValueError, match="not held"):
        buffer.read(delivery)
    buffer.close()
    assert (tmp_path / "b").exists() == (durability != "memory")


def test_waiting_for_enough_groups(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, groups_per_step=3)
    for _ in range(2):
        generate(buffer, admit(buffer))
    assert buffer.take(max_groups=3, min_groups=3) is None
    assert buffer.take(max_groups=3, min_groups=2) == Delivery(step=0, groups=(0, 1))
    generate(buffer, admit(buffer))
    assert buffer.take(max_groups=3, min_groups=2) == Delivery(step=0, groups=(2,)), "the step lacks only one"


def test_failed_and_late_samples_are_counted_with_their_reason(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    failing, slow = admit(buffer), admit(buffer)
    buffer.append(payload(failing.group, 0, tokens=5))
    assert buffer.fail(Slot(failing.group, 0), "reward_error").status == "duplicate", "already stored"
    assert buffer.fail(Slot(failing.group, 1), "reward_invalid", tokens=3).status == "dropped"
    assert buffer.append(payload(failing.group, 1)).status == "dropped"
    assert buffer.expire(now=9.9) == ()
    assert buffer.expire(now=10.0) == (slow.group,)
    assert [buffer.append(payload(slow.group, 0, tokens=7)).status for _ in range(2)] == ["dropped", "dropped"]
    assert buffer.fail(Slot(slow.group, 1), "engine_error", tokens=2).status == "dropped"
    assert buffer.ledger() == LedgerCounts(
        leased=4,
        in_flight=0,
        buffered=0,
        consumed=0,
        dropped={"group_incomplete": 1, "reward_invalid": 1, "timeout": 2},
    )
    assert buffer.waste() == {"group_incomplete": 5, "reward_invalid": 3, "timeout": 9}


def test_wrong_calls_say_what_is_wrong(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    with pytest.raises(ValueError, match="no ticket was issued"):
        buffer.append(payload(0, 0))
    with pytest.raises(ValueError, match="not a trajectory payload"):
        buffer.append(b"junk")
    with pytest.raises(ValueError, match="step 0 has taken 0 of 2 groups"):
        buffer.commit(0)
    with pytest.raises(ValueError, match="version 1 cannot be published"):
        buffer.advance(1)
    assert buffer.ledger().leased == 0


def test_one_bad_payload_stores_nothing_of_its_batch(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    admit(buffer)
    with pytest.raises(ValueError, match="not a trajectory"):
        buffer.append_many([payload(0, 0), b"junk"])
    assert buffer.append(payload(0, 0)).status == "stored"


def test_a_directory_has_one_owner_and_is_not_reused(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    with pytest.raises(ConfigError, match="in use by another process"):
        open_buffer(tmp_path)
    buffer.close()
    with pytest.raises(ConfigError, match="already holds a run"):
        open_buffer(tmp_path)
    with pytest.raises(ConfigError, match=r"groups_per_step=2.*groups_per_step=3"):
        open_buffer(tmp_path, restore_step=0, groups_per_step=3)
    with pytest.raises(CheckpointError, match="checkpoint is at step 3, but the buffer's records end in step 0"):
        open_buffer(tmp_path, restore_step=3)
    open_buffer(tmp_path, restore_step=0).close()


def test_files_belong_to_the_user_alone(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", segment_bytes=1)
    train_step(buffer, 0)
    buffer.checkpointed(1)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    files = list((tmp_path / "run").iterdir())
    assert len(files) > 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_no_file_is_written_at_durability_memory(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "run", durability="memory")
    train_step(buffer, 0)
    assert not (tmp_path / "run").exists()
    with pytest.raises(CheckpointError):
        open_buffer(tmp_path / "run", durability="memory", restore_step=1)


def test_segments_go_only_when_every_consumer_is_past_them(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, segment_bytes=1, keep="bytes:1")
    train_step(buffer, 0)
    train_step(buffer, 1)
    assert buffer.prune().files == [], "nobody has said what it needs"
    buffer.checkpointed(1)
    buffer.move_cursor("drafter", 2)
    # Each group is one segment of two frames; the checkpoint is past the groups of step 0, the drafter past one.
    assert buffer.prune().files == ["trajectories-000000000000000.seg"]
    buffer.move_cursor("drafter", 100)
    assert buffer.prune().files == ["trajectories-000000000000002.seg"]
    assert buffer.prune() == ([], 0)
    with pytest.raises(ValueError, match=r"consumer '\.\./x' must match"):
        buffer.move_cursor("../x", 1)
    before = buffer.ledger()
    buffer.close()
    again = open_buffer(tmp_path, segment_bytes=1, restore_step=1)
    replayed = again.take(2)
    assert replayed == Delivery(step=1, groups=(2, 3), replayed=True)
    assert len(again.read(replayed)) == 4
    again.commit(1)
    again.advance(2)
    assert again.ledger() == before


def test_reading_from_outside_while_the_run_writes(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, segment_bytes=2000)
    tickets = [admit(buffer) for _ in range(4)]
    for ticket in tickets[:3]:
        generate(buffer, ticket)
    [journal] = tmp_path.glob("ledger-*.open")
    [tail] = tmp_path.glob("trajectories-*.open")
    with tail.open("ab") as file:
        file.write(b"half a fra")
    assert list(read_run(tmp_path)) == [trajectory(group, i) for group in range(3) for i in range(2)]
    report = verify(tmp_path)
    assert report.sound
    assert (report.trajectories, report.records, report.torn_bytes) == (6, 5, 10)
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.glob("*-*"))
    sealed = min(tmp_path.glob("trajectories-*.seg"))
    raw = bytearray(sealed.read_bytes())
    raw[-60] ^= 4
    sealed.write_bytes(raw)
    report = verify(tmp_path)
    assert not report.sound
    assert sealed.name in report.bad[0]
    assert journal.exists()


def test_a_full_disk_loses_nothing_and_the_buffer_goes_on(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    acknowledged: set[Slot] = set()
    slots: list[Slot] = []

    def produce() -> None:
        while True:
            ticket = admit(buffer)
            slots.extend(Slot(ticket.group, i) for i in ticket.samples)
            for slot in slots[-2:]:
                acknowledged.add(buffer.append(payload(slot.group, slot.sample, tokens=100)).slot)

    with file_size_limit(6000), pytest.raises(OSError, match="make room and try again"):
        produce()
    assert acknowledged
    assert len(acknowledged) < len(slots)
    assert buffer.ledger().balanced
    for slot in slots:
        expected = "duplicate" if slot in acknowledged else "stored"
        assert buffer.append(payload(slot.group, slot.sample, tokens=100)).status == expected
    assert [item.slot for item in read_run(tmp_path)] == slots
    assert verify(tmp_path).sound


def test_memory_is_bounded_when_the_trainer_stops(tmp_path: Path) -> None:
    """Producers wait, with the reason; nothing is dropped, and the process does not hold more than the budget."""
    budget, tokens = 4 << 20, 20_000
    buffer = open_buffer(tmp_path, max_bytes=budget, max_staleness=1000, sample_bytes=12 * tokens + 2048)
    tracemalloc.start()
    while isinstance(ticket := buffer.admit(0.0), Ticket):
        for sample in ticket.samples:
            buffer.append(payload(ticket.group, sample, tokens=tokens))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert ticket.reason.startswith("memory: ")
    assert buffer.status().bytes <= budget
    assert budget / 2 < held < 1.1 * budget
    assert buffer.ledger().dropped == {}
    delivery = buffer.take(2)
    assert delivery is not None
    buffer.commit(0)
    assert isinstance(buffer.admit(0.0), Ticket), "consumed bytes are credit again"


def test_a_budget_below_one_step_is_an_error_not_a_deadlock(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_bytes=3000, sample_bytes=1000)
    generate(buffer, admit(buffer))
    assert buffer.status().bytes > 1000
    with pytest.raises(ConfigError, match=r"buffer.max_bytes=3000 cannot hold one step of 2 groups of \d+ bytes"):
        buffer.admit(0.0)


def test_status_names_what_is_missing(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=0)
    admit(buffer), admit(buffer)
    buffer.append(payload(0, 1))
    status = buffer.status()
    assert (status.oldest_group, status.missing) == (0, (0,))
    assert (status.complete, status.incomplete, status.taken) == (0, 2, 0)
    assert status.refusal == "staleness: 2 groups wait to be trained"
