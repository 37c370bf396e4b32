"""Recovery and replay: what a run's directory holds, and a ledger that first repeats it and then goes on.

`read_history` reads the journal and the trajectory log back. `JournaledLedger` keeps ledger, journal and payloads in
step: a decision is written, then applied; one that was written before is applied again.

Replay. A checkpoint after S optimizer steps is older than the journal. Records up to the commit of step S - 1 are
folded at once; the rest is a script. Deliveries and commits in it wait for the trainer to repeat them, one by one;
everything between them is folded on the way. When the script is used up and the last recorded version is published
again, the state is the one at the kill. Nothing is written in the meantime, so a replay can itself be killed.
"""

from collections import defaultdict, deque
from typing import NamedTuple, TypeVar

import msgspec

from asyncrl.buffer.journal import (
    Admitted,
    Advanced,
    Begun,
    Committed,
    Delivered,
    Dropped,
    Folded,
    Journal,
    Record,
    Stored,
)
from asyncrl.buffer.ledger import Ledger, LedgerRules
from asyncrl.buffer.log import Log
from asyncrl.buffer.payloads import Payloads
from asyncrl.data import arrow
from asyncrl.errors import CheckpointError, ConfigError, CorruptSegmentError
from asyncrl.types import GIVEN, Slot

Repeatable = TypeVar("Repeatable", Delivered, Committed)


# -- reading a directory back ------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A payload that was decoded once and is valid."""

    slot: Slot
    payload: bytes
    tokens: int
    oldest: int
    """Version of the oldest sampled token, GIVEN when there is none."""
    reward: float
    uneven: bool = False
    """See `Stored`."""

    @classmethod
    def of(cls, row: arrow.Row, payload: bytes) -> "Sample":
        uneven = len(set(row.turn_rewards)) > 1
        return cls(row.slot, payload, row.sampled_tokens, row.oldest_version, row.earned, uneven)

    def stored(self, admitted_at: int) -> Stored:
        """The event of its storing; without a sampled token it is as old as its group's admission."""
        oldest = admitted_at if self.oldest == GIVEN else self.oldest
        size = len(self.payload)
        return Stored(self.slot.group, self.slot.sample, size, self.tokens, oldest, self.reward, self.uneven)


def check(payload: bytes) -> Sample:
    """Read a payload, or raise ValueError with what is wrong with it."""
    return Sample.of(arrow.read_row(payload), payload)


class History(NamedTuple):
    """What a buffer's directory holds."""

    records: list[Record]
    stored: dict[int, list[Stored]]
    """Samples by group. The order between them and the records does not matter: a sample only counts from its group's
    admission to its end, and both are records."""


def read_history(journal: Journal, log: Log | None, payloads: Payloads, rules: LedgerRules, step: int) -> History:
    """What a run needs that is resumed after `step` optimizer steps, checked and indexed; the logs are ready to append
    after it."""
    records = journal.recover(step)
    folded = _beginning(records, rules, step)
    admitted = {record.group: record.version for record in records if isinstance(record, Admitted)}
    if folded:
        admitted |= {each.group: each.version for each in folded.waiting}
    stored: dict[int, list[Stored]] = defaultdict(list)
    for location, frame in log.recover(folded.first_sequence if folded else 0) if log else ():
        try:
            sample = check(frame.payload)
        except ValueError as error:  # its checksum is right, so whoever wrote it meant it
            raise CorruptSegmentError(f"trajectory {location.sequence} of the log cannot be read: {error}") from None
        if sample.slot.group not in admitted:
            if folded and sample.slot.group < folded.next_group:
                continue  # of a group that had ended
            raise CorruptSegmentError(
                f"the log holds {sample.slot}, which the journal never admitted: its last records are lost, as a power "
                f"failure can do at durability `process`; start a new run, or use buffer.durability=disk"
            )
        if payloads.locate(sample.slot, location):
            stored[sample.slot.group].append(sample.stored(admitted[sample.slot.group]))
    return History(records, stored)


def _beginning(records: list[Record], rules: LedgerRules, step: int) -> Folded | None:
    """The state that the records begin with, if they were pruned or not read from the first on.

    The arithmetic of the journal only holds under the rules it was written with. A tighter bound of staleness is a
    change that it has records for."""
    if not records:
        return None
    first = records[0]
    folded = first if isinstance(first, Folded) else None
    begun = folded.begun if folded else first
    bound = begun.max_staleness if isinstance(begun, Begun) and rules.max_staleness <= begun.max_staleness else -1
    if begun != msgspec.structs.replace(rules.begun, max_staleness=bound):
        raise ConfigError(
            f"the buffer was begun with {begun} and cannot go on with {rules.begun}; resume with the same settings, or "
            "with a lower max_staleness"
        )
    if folded and folded.step > step:
        raise CheckpointError(
            f"the records of the first {folded.step} steps were pruned (buffer.keep), so the run cannot be resumed "
            f"after {step}: it needs a checkpoint of step {folded.step} or a later one"
        )
    return folded


# -- writing and repeating ---------------------------------------------------------------------------------------


class JournaledLedger:
    """Ledger, journal and payloads, changed together."""

    def __init__(self, ledger: Ledger, journal: Journal, payloads: Payloads) -> None:
        self._ledger, self._journal, self._payloads = ledger, journal, payloads
        self._script: deque[Record] = deque()
        self._stored: dict[int, list[Stored]] = {}
        self._published = 0
        self._first_of_step: dict[int, int] = {}
        self._known_from = 0
        self.orphaned = False
        """Whether samples that were in flight at the kill still lack a new ticket."""

    @property
    def replaying(self) -> bool:
        return bool(self._script) or self._published < self._ledger.version

    def record(self, *records: Record) -> None:
        """Write decisions and what a curriculum learns from them, then apply both."""
        decided = (*records, *self._ledger.measured(records))
        self._journal.write(*decided)
        for record in decided:
            self._apply(record)
        if records and isinstance(records[-1], Committed) and self._journal.is_long:
            folded = self._ledger.folded(self._payloads.first_sequence(self._payloads.groups()))
            self._journal.fold(folded)
            self._apply(folded)

    def restore(self, history: History, step: int) -> None:
        """Fold up to the checkpoint after `step` optimizer steps; engines start with that version."""
        self._script, self._stored, self._published = deque(history.records), history.stored, step
        while self._script and self._ledger.step < step:
            self._follow()
        if self._ledger.step < step:
            raise CheckpointError(
                f"the checkpoint is at step {step}, but the buffer's records end in step {self._ledger.step}: they do "
                f"not belong together, or the records were lost with the machine"
            )
        self._catch_up()

    def repeat(self, kind: type[Repeatable]) -> Repeatable | None:
        """Apply the delivery or commit that comes next in the script; None when there is no script."""
        if not self._script:
            return None
        record = self._script[0]
        if not isinstance(record, kind):
            raise CorruptSegmentError(f"{record} was recorded where the trainer requests {kind.__name__}")
        self._follow()
        self._catch_up()
        return record

    def publish(self, version: int) -> None:
        """Engines serve `version`; recorded once the script is used up."""
        self._published = max(self._published, version)
        if not self._script and self._published > self._ledger.version:
            self.record(Advanced(self._published))

    def first_needed(self, step: int) -> int:
        """The first sequence of the log that a run resumed after `step` optimizer steps needs; 0 if that is not known
        because an older state was left out when the run was opened."""
        if step < self._known_from:
            return 0
        needed = (first for s, first in self._first_of_step.items() if s >= step)
        return min([self._payloads.first_sequence(self._payloads.groups()), *needed])

    def forget(self, step: int) -> None:
        """`first_needed` is not asked about the steps before `step` any more."""
        self._first_of_step = {s: first for s, first in self._first_of_step.items() if s >= step}

    def _follow(self) -> None:
        record = self._script.popleft()
        try:
            self._apply(record)
        except KeyError as error:  # its checksum is right, so this is no accident
            raise CorruptSegmentError(f"{record} does not follow from the records before it") from error

    def _apply(self, record: Record) -> None:
        """Apply a record to the ledger, and forget the payloads of the groups that it ends."""
        if isinstance(record, Committed):
            self._first_of_step[record.step] = self._payloads.first_sequence(self._ledger.delivered)
            for group in self._ledger.delivered:
                self._payloads.forget(group)
        elif isinstance(record, Dropped):
            self._payloads.forget(record.group)
        elif isinstance(record, Folded) and not self._ledger.next_group:
            self._known_from = record.step
        self._ledger.apply(record)
        if isinstance(record, Admitted):
            self._apply_stored(record.group)
        elif isinstance(record, Folded):
            for each in record.waiting:
                self._apply_stored(each.group)

    def _apply_stored(self, group: int) -> None:
        for stored in self._stored.pop(group, ()):
            self._ledger.apply(stored)

    def _catch_up(self) -> None:
        while self._script and not isinstance(self._script[0], Delivered | Committed):
            self._follow()
        if not self._script:
            self.orphaned = self._ledger.num_complete < len(self._ledger.waiting)
            self.publish(self._published)
