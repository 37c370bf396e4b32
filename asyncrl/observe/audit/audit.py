"""The verdict over a run's directory: nothing lost, nothing twice, nothing trained on that should not be.

Reads what the run wrote and nothing else, so it can be asked of a killed run, of a finished one, or of a copy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.buffer.consumed import EarlierGroups
from asyncrl.buffer.journal import Admitted, Begun, Folded, Record
from asyncrl.buffer.replay import Sample
from asyncrl.data.arrow import Row
from asyncrl.data.episodes import lines
from asyncrl.observe.audit.accounts import Accounts, Samples
from asyncrl.observe.audit.evidence import DamageError, Location, Tally, pruned_below, read_journal, read_rows
from asyncrl.observe.audit.records import Events
from asyncrl.types import GIVEN, LedgerCounts, Slot

NOTHING = LedgerCounts(leased=0, in_flight=0, buffered=0, consumed=0, dropped={})


class Manifest(Protocol):
    """What is asked of a checkpoint."""

    @property
    def step(self) -> int: ...
    @property
    def samples_trained(self) -> int: ...
    @property
    def consumed(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def earlier(self) -> EarlierGroups | None: ...


class Audit(msgspec.Struct):
    """What was read, and what is wrong with it: `violations` is empty for a sound run."""

    journal: Tally = msgspec.field(default_factory=Tally)
    log: Tally = msgspec.field(default_factory=Tally)
    ledger: LedgerCounts = NOTHING
    """At the journal's end."""
    steps: int = 0
    rows: int = 0
    """Steps in metrics.parquet."""
    events: Events = msgspec.field(default_factory=Events)
    violations: list[str] = msgspec.field(default_factory=list[str])

    @property
    def sound(self) -> bool:
        return not self.violations


def audit(
    trajectories: Path, run_id: str, manifests: Mapping[str, Manifest], summary: Mapping[str, Any] | None = None
) -> Audit:
    """`manifests`: of the checkpoints, by name; `summary`: of a finished run."""
    found = Audit()
    try:
        records = list(read_journal(trajectories, run_id, found.journal))
        if not records:
            if any(manifest.step for manifest in manifests.values()):
                raise DamageError(f"{trajectories} holds no journal, but there are checkpoints")
            return found
        accounts = _accounts(records, trajectories, run_id, found.log)
        for location, record in records[1:]:
            _follow(accounts, location, record)
            found.ledger, found.steps = accounts.ledger(), accounts.step
        for name, manifest in manifests.items():
            _check_manifest(name, manifest, accounts)
        if summary is not None and summary.get("status") == "ok":
            _check_summary(summary, found)
    except DamageError as damage:
        found.violations.append(str(damage))
    return found


def _accounts(records: list[tuple[Location, Record]], trajectories: Path, run_id: str, tally: Tally) -> Accounts:
    location, first = records[0]
    if not isinstance(first, Begun | Folded):
        raise DamageError(f"{location}: the journal begins with {first}: its first records are lost")
    admitted = {record.group: record.version for _, record in records if isinstance(record, Admitted)}
    ended_before, size = 0, first.begun.group_size if isinstance(first, Folded) else first.group_size
    if isinstance(first, Folded):
        admitted |= {each.group: each.version for each in first.waiting}
        ended_before = first.next_group
    samples: Samples = {}
    for location, row in read_rows(trajectories, run_id, tally):
        if row.slot.group < ended_before and row.slot.group not in admitted:
            continue  # its group had ended before the journal that is left
        _check_row(location, row, size, admitted)
        of_group = samples.setdefault(row.slot.group, {})
        if row.slot.sample in of_group:
            raise DamageError(f"{location}: {_name(row.slot)} is stored twice")
        sample = Sample.of(row, b"")
        of_group[row.slot.sample] = sample.stored(admitted[row.slot.group])
    if tally.first > (needed := pruned_below(trajectories)):
        raise DamageError(f"trajectories before {tally.first} are gone, but a consumer needs those from {needed} on")
    return Accounts(first, samples, pruned=tally.first > 0)


def _check_row(location: Location, row: Row, group_size: int, admitted: Mapping[int, int]) -> None:
    if row.slot.group not in admitted or row.slot.sample >= group_size:
        raise DamageError(f"{location}: {_name(row.slot)} is stored, but no ticket was issued for it")
    branches = () if row.episode is None else row.episode.branches
    for line in lines(len(row.tokens), branches):  # parallel calls are sampled at the same time
        here = [run for run in row.runs if run[0] < line.stop and line.start < run[1]]
        versions = [version for _, _, version in here if version != GIVEN]
        if versions != sorted(versions):
            raise DamageError(f"{location}: {_name(row.slot)} goes back in versions: {versions}")


def _follow(accounts: Accounts, location: Location, record: Record) -> None:
    try:
        accounts.follow(record)
    except DamageError as damage:
        raise DamageError(f"{location}: {damage}") from None


def _check_manifest(name: str, manifest: Manifest, accounts: Accounts) -> None:
    if manifest.step > accounts.step:
        raise DamageError(f"{name} holds {manifest.step} steps, but the journal commits {accounts.step}")
    if manifest.step < accounts.first_step:
        return  # the journal of these steps was pruned
    claimed = [group for first, last in manifest.consumed for group in range(first, last + 1)]
    before = manifest.earlier or EarlierGroups()
    of_all = accounts.trained_before(manifest.step)
    trained = [group for group in of_all if group >= before.below]
    old = EarlierGroups.of((group for group in of_all if group < before.below), before.below)
    if not accounts.first_step and old != before:
        raise DamageError(
            f"{name}: its manifest counts {before.groups} groups below {before.below}, with the digest "
            f"{before.digest:x}; the journal delivers {old.groups}, with {old.digest:x}"
        )
    unknown = set(claimed) - set(trained)
    if missing := sorted((set(trained) - set(claimed)) | {group for group in unknown if not accounts.ended(group)}):
        raise DamageError(
            f"{name}: groups {missing[:5]} are in its manifest or in the journal's deliveries, but not in both"
        )
    if len(claimed) != len(set(claimed)):
        raise DamageError(f"{name}: its manifest names a group twice")
    samples = accounts.consumed_before + sum(map(accounts.size, of_all))
    if manifest.samples_trained != samples:
        raise DamageError(f"{name}: {manifest.samples_trained} samples are not the {samples} of its groups")


def _check_summary(summary: Mapping[str, Any], found: Audit) -> None:
    """A run that says it ended well has all its steps, and ends with the sums that the journal gives."""
    if summary["steps"] != found.steps:
        raise DamageError(f"summary.json counts {summary['steps']} steps, the journal {found.steps}")
    if summary["samples_trained"] != found.ledger.consumed:
        raise DamageError(
            f"summary.json counts {summary['samples_trained']} samples, the journal {found.ledger.consumed}"
        )
    if summary["ledger"] != msgspec.to_builtins(found.ledger):
        raise DamageError(
            f"summary.json ends with {summary['ledger']}, the journal with {msgspec.to_builtins(found.ledger)}"
        )


def _name(slot: Slot) -> str:
    return f"group {slot.group} sample {slot.sample}"
