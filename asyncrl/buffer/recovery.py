"""Read a run's directory back: what was decided, and what was stored."""

from collections import defaultdict
from typing import NamedTuple

from asyncrl.buffer.journal import Journal
from asyncrl.buffer.log import Log
from asyncrl.buffer.payloads import Payloads
from asyncrl.buffer.records import Admitted, Record, Stored
from asyncrl.buffer.terms import Terms
from asyncrl.data import arrow
from asyncrl.errors import ConfigError, CorruptSegmentError
from asyncrl.types import GIVEN, Slot


class Sample(NamedTuple):
    """A payload that has been decoded once and found sound."""

    slot: Slot
    payload: bytes
    tokens: int
    oldest: int
    """Version of the oldest sampled token, GIVEN when there is none."""
    reward: float

    def stored(self, admitted_at: int) -> Stored:
        """The event of its storing; without a sampled token it is as old as its group's admission."""
        oldest = admitted_at if self.oldest == GIVEN else self.oldest
        return Stored(self.slot.group, self.slot.sample, len(self.payload), self.tokens, oldest, self.reward)


def check(payload: bytes) -> Sample:
    """Read a payload, or raise ValueError with what is wrong with it."""
    row = arrow.read_row(payload)
    return Sample(row.slot, payload, row.sampled_tokens, row.oldest_version, row.reward)


class History(NamedTuple):
    """What a directory holds."""

    records: list[Record]
    stored: dict[int, list[Stored]]
    """Samples by group. The order between them and the records does not matter: a sample only counts from its group's
    admission to its end, and both are records."""


def read_history(journal: Journal, log: Log | None, payloads: Payloads, terms: Terms) -> History:
    """Everything on disk, checked and indexed; the logs are ready to append after it."""
    records = journal.recover()
    _check_terms(records, terms)
    admitted = {record.group: record.version for record in records if isinstance(record, Admitted)}
    stored: dict[int, list[Stored]] = defaultdict(list)
    for place, frame in log.recover() if log else ():
        try:
            sample = check(frame.payload)
        except ValueError as error:  # its checksum is right, so whoever wrote it meant it
            raise CorruptSegmentError(f"trajectory {place.sequence} of the log cannot be read: {error}") from None
        if sample.slot.group not in admitted:
            raise CorruptSegmentError(
                f"the log holds {sample.slot}, which the journal never leased: its last records are lost, as a power "
                f"failure can do at durability `process`; start a new run, or use buffer.durability=disk"
            )
        if payloads.locate(sample.slot, place):
            stored[sample.slot.group].append(sample.stored(admitted[sample.slot.group]))
    return History(records, stored)


def _check_terms(records: list[Record], terms: Terms) -> None:
    """The arithmetic of the journal only holds under the terms it was written with."""
    if records and records[0] != terms.begun:
        raise ConfigError(
            f"the buffer was begun with {records[0]} and cannot go on with {terms.begun}; resume with the same settings"
        )
