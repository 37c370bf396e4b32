"""Read a buffer's directory from another process, while the run writes or long after it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asyncrl.buffer import journal, payloads
from asyncrl.buffer.log import SEALED, Frame, Scan, segment_paths
from asyncrl.buffer.payloads import unpack_slot
from asyncrl.data import arrow
from asyncrl.errors import CorruptSegmentError
from asyncrl.types import Slot, Trajectory


class Report(msgspec.Struct, kw_only=True):
    """What `verify` found. `sound` is the verdict."""

    files: int = 0
    trajectories: int = 0
    records: int = 0
    bytes: int = 0
    torn_bytes: int = 0
    """Bytes after the last whole frame of an open file: being written, or left by a crash."""
    duplicates: int = 0
    bad: list[str] = msgspec.field(default_factory=list[str])

    @property
    def sound(self) -> bool:
        return not self.bad and not self.duplicates


def read_payloads(directory: Path) -> Iterator[bytes]:
    """The payload of every stored slot, in the order they were stored; a frame being written is left out."""
    seen: set[Slot] = set()
    for path in segment_paths(directory, payloads.STEM):
        for frame in _present(Scan(path, schema=payloads.SCHEMA_HASH)):
            slot = unpack_slot(frame.slot)
            if slot not in seen:
                seen.add(slot)
                yield frame.payload


def read_run(directory: Path) -> Iterator[Trajectory]:
    """Every stored trajectory, delivered or not."""
    return map(arrow.decode, read_payloads(directory))


def read_deliveries(directory: Path) -> dict[int, list[tuple[int, ...]]]:
    """The groups of every step, as the trainer got them: one entry for each forward and backward, in order.

    What a resumed run was delivered again appears once, at its first delivery.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    seen: set[int] = set()
    for path in segment_paths(directory, journal.STEM):
        for frame in _present(Scan(path, schema=journal.SCHEMA_HASH)):
            match journal.decode(frame.payload):
                case journal.Delivered(step=step, groups=groups) if seen.isdisjoint(groups):
                    seen.update(groups)
                    found.setdefault(step, []).append(groups)
                case _:
                    pass
    return dict(sorted(found.items()))


def read_failures(directory: Path) -> Counter[int]:
    """How many samples each group was trained on without, of those that lack any."""
    found: Counter[int] = Counter()
    for path in segment_paths(directory, journal.STEM):
        for frame in _present(Scan(path, schema=journal.SCHEMA_HASH)):
            match journal.decode(frame.payload):
                case journal.Failed(group=group):
                    found[group] += 1
                case _:
                    pass
    return found


def read_admissions(directory: Path) -> dict[int, float]:
    """The first deadline of every group, which lies `flow.group_timeout_s` after its admission."""
    found: dict[int, float] = {}
    for path in segment_paths(directory, journal.STEM):
        for frame in _present(Scan(path, schema=journal.SCHEMA_HASH)):
            match journal.decode(frame.payload):
                case journal.Admitted(group=group, deadline=deadline):
                    found.setdefault(group, deadline)
                case _:
                    pass
    return found


def verify(directory: Path) -> Report:
    """Check every byte of a buffer's directory."""
    report = Report()
    slots: set[Slot] = set()
    for stem, schema in ((payloads.STEM, payloads.SCHEMA_HASH), (journal.STEM, journal.SCHEMA_HASH)):
        for path in segment_paths(directory, stem):
            scan = Scan(path, schema=schema)
            try:
                for frame in _present(scan):
                    if stem == journal.STEM:
                        journal.decode(frame.payload)
                        report.records += 1
                    else:
                        _verify_trajectory(frame, slots, report)
            except (CorruptSegmentError, ValueError) as error:
                report.bad.append(str(error))
            report.files += 1
            report.bytes += scan.size
            report.torn_bytes += 0 if scan.sealed else scan.size - scan.end
    return report


def _verify_trajectory(frame: Frame, slots: set[Slot], report: Report) -> None:
    slot = arrow.decode(frame.payload).slot
    if slot != unpack_slot(frame.slot):
        raise ValueError(f"a frame of {unpack_slot(frame.slot)} holds the trajectory of {slot}")
    report.duplicates += slot in slots
    report.trajectories += 1
    slots.add(slot)


def _present(scan: Scan) -> Iterator[Frame]:
    """The frames of a file, which its writer may seal, and thereby rename, between listing and reading."""
    try:
        yield from scan
    except FileNotFoundError:
        scan.path = scan.path.with_suffix(SEALED)
        yield from scan
