"""Pruning and folding: what is kept is bounded, nothing needed goes, and a kill between two steps harms nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.journal import Folded, Journal, first_record
from asyncrl.buffer.log import segment_paths
from asyncrl.buffer.reader import read_run
from asyncrl.buffer.retention import Cursors, Pruned, read_pruned
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Buffer
from asyncrl.errors import CheckpointError, StorageError
from asyncrl.observe.audit.audit import audit
from asyncrl.observe.query.group_outcomes import read_group_outcomes
from asyncrl.observe.query.logs import open_files
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.types import LedgerCounts, Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload
from tests.support.full_disk import file_size_limit

TERMS: dict[str, Any] = {"segment_bytes": 3000, "journal_bytes": 600, "max_staleness": 2}
"""Groups of 2, 2 groups a step: a journal file for every few steps, a log file for every one or two."""


def run_on(buffer: TrajectoryBuffer, steps: range, checkpoint_every: int = 4) -> None:
    """A drop every third step, a straggler all the time, and the last two checkpoints are kept."""
    for step in steps:
        while buffer.status().taken < 2:
            ticket = buffer.admit(0.0)
            assert isinstance(ticket, Ticket), ticket
            if step % 3 == 0 and ticket.group % 4 == 1:
                buffer.fail(Slot(ticket.group, 0), "reward_error", tokens=3)
                continue
            buffer.append_many([payload(ticket.group, sample, step) for sample in range(2)])
            buffer.take(1)
        buffer.commit(step)
        buffer.advance(step + 1)
        if (step + 1) % checkpoint_every == 0:
            buffer.checkpointed(max(step + 1 - checkpoint_every, 0))
            buffer.prune()


def consumed(directory: Path, step: int) -> TrainingManifest:
    """As the trainer would write it: every group that was not dropped, in order of admission."""
    dropped = {record.group for record in Journal(directory, run_id="test-run", sync=False).recover()
               if isinstance(record, journal.Dropped)}  # fmt: skip
    groups = [group for group in range(10_000) if group not in dropped][: 2 * step]
    return TrainingManifest(step=step, samples_trained=4 * step, consumed=tuple((group, group) for group in groups))


def killed(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock")))


def resumed(directory: Path, step: int) -> tuple[LedgerCounts, dict[str, int], int]:
    """The state of a run that is resumed there, once it has repeated what was recorded."""
    buffer = open_buffer(directory, restore_step=step, keep="steps:1", **TERMS)
    buffer.advance(step)
    while buffer.replaying:
        delivery = buffer.take(2)
        assert delivery is not None
        assert len(buffer.read(delivery)) == 2 * len(delivery.groups)
        if buffer.status().taken == 2:
            buffer.commit(delivery.step)
            buffer.advance(delivery.step + 1)
    found = buffer.ledger(), buffer.waste(), buffer.status().step
    buffer.close()
    return found


@pytest.mark.parametrize("keep", ["all", "steps:3", "bytes:9000"])
def test_what_is_kept_is_bounded_and_the_run_is_sound(tmp_path: Path, keep: str) -> None:
    buffer = open_buffer(tmp_path, keep=keep, **TERMS)
    sizes: list[int] = []
    for steps in (range(12), range(12, 24), range(24, 60)):
        run_on(buffer, steps)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    before = buffer.ledger(), buffer.waste(), buffer.status().step
    buffer.close()
    pruned = read_pruned(tmp_path)
    assert bool(pruned) == (keep != "all")
    if keep == "all":
        assert len(list(read_run(tmp_path))) == 4 * 60
        assert sizes[2] > 2 * sizes[1]
    else:
        assert sizes[2] < 1.5 * sizes[1], sizes
        assert pruned.steps > 40
        assert str(pruned).startswith(f"the first {pruned.trajectories} trajectories and the records of the first ")
    found = audit(tmp_path, "test-run", {})
    assert found.sound, found.violations
    assert (found.ledger, found.steps) == (before[0], 60)
    assert resumed(killed(tmp_path, tmp_path / "again"), 56) == before


def test_opening_does_not_read_more_as_a_run_grows(tmp_path: Path) -> None:
    """Also if nothing is pruned."""
    buffer = open_buffer(tmp_path, **TERMS)
    records: list[int] = []
    for steps in (range(20), range(20, 80)):
        run_on(buffer, steps)
        copy = killed(tmp_path, tmp_path / f"{steps.stop}")
        records.append(len(Journal(copy, run_id="test-run", sync=False).recover(steps.stop)))
    assert max(records) < 40, records
    assert len(Journal(copy, run_id="test-run", sync=False).recover(0)) > 400


def test_a_kill_between_any_two_deletions_harms_nothing(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "pruned", keep="steps:1", **TERMS)
    run_on(buffer, range(16), checkpoint_every=100)
    buffer.checkpointed(12)
    killed(tmp_path / "pruned", tmp_path / "run")
    expected = resumed(killed(tmp_path / "run", tmp_path / "expected"), 12)
    deleted = buffer.prune().files
    assert {name.partition("-")[0] for name in deleted} == {payloads.STEM, journal.STEM}
    for count in range(len(deleted) + 1):
        left = killed(tmp_path / "run", tmp_path / f"left-{count}")
        for name in deleted[:count]:
            (left / name).unlink()
        found = audit(left, "test-run", {})
        assert found.sound, (deleted[:count], found.violations)
        assert resumed(left, 12) == expected, deleted[:count]


def test_a_kill_while_a_journal_is_folded_harms_nothing(tmp_path: Path) -> None:
    """At every length of the new file, that of none at all included."""
    buffer = open_buffer(tmp_path / "run", **TERMS)
    step = 0
    while not isinstance(first_record(segment_paths(tmp_path / "run", journal.STEM)[-1]), Folded):
        run_on(buffer, range(step, step + 1))
        step += 1
    expected = resumed(killed(tmp_path / "run", tmp_path / "expected"), step)
    newest = segment_paths(tmp_path / "run", journal.STEM)[-1]
    size = newest.stat().st_size - 1
    for length in [*range(0, size, 7), size]:
        left = killed(tmp_path / "run", tmp_path / f"left-{length}")
        with (left / newest.name).open("r+b") as file:
            file.truncate(length)
        if not length:
            (left / newest.name).unlink()
        (counts, waste, at) = resumed(left, step)
        assert (counts, waste, at) == expected
        assert audit(left, "test-run", {}).sound


def test_a_checkpoint_older_than_what_is_left_is_refused_with_the_reason(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, keep="steps:1", **TERMS)
    run_on(buffer, range(24))
    buffer.close()
    steps = read_pruned(tmp_path).steps
    with pytest.raises(CheckpointError, match=rf"the first {steps} steps were pruned \(buffer.keep\)"):
        open_buffer(tmp_path, restore_step=0, keep="steps:1", **TERMS)


def test_manifests_and_outcomes_of_a_pruned_run(tmp_path: Path) -> None:
    whole = open_buffer(tmp_path / "whole", **TERMS)
    run_on(whole, range(24))
    manifest = consumed(tmp_path / "whole", 24)
    buffer = open_buffer(tmp_path / "run", keep="steps:3", **TERMS)
    run_on(buffer, range(24))
    assert audit(tmp_path / "run", "test-run", {"step-24": manifest}).sound
    wrong = TrainingManifest(step=24, samples_trained=manifest.samples_trained, consumed=((0, 47),))
    assert "are in its manifest or" in audit(tmp_path / "run", "test-run", {"step-24": wrong}).violations[0]
    all_groups = read_group_outcomes(open_files(tmp_path / "whole", journal.STEM, journal.SCHEMA_HASH))
    left = read_group_outcomes(open_files(tmp_path / "run", journal.STEM, journal.SCHEMA_HASH))
    assert 0 < left.known.sum() < len(left.known) == len(all_groups.known) == all_groups.known.sum()
    for name in ("versions", "steps", "takes", "failed"):
        assert (getattr(left, name)[left.known] == getattr(all_groups, name)[left.known]).all()


def test_nothing_is_pruned_from_a_directory_without_a_run(tmp_path: Path) -> None:
    assert read_pruned(tmp_path) == Pruned(0, 0)


@pytest.mark.parametrize("keep", ["none", "steps", "steps:0", "bytes:-1", "10"])
def test_other_words_are_refused(keep: str) -> None:
    with pytest.raises(ValueError, match="must be all, steps:N or bytes:N, such as steps:100"):
        Buffer(keep=keep)


def test_a_full_disk_is_a_storage_error_and_the_cursor_stays_where_it_was(tmp_path: Path) -> None:
    cursors = Cursors(tmp_path)
    cursors.move("trainer", 7)
    with file_size_limit(0), pytest.raises(StorageError, match="make room and try again"):
        cursors.move("trainer", 8)
    assert cursors.all() == {"trainer": 7}
    cursors.move("trainer", 9)
    assert cursors.all() == {"trainer": 9}
