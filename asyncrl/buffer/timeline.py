"""The course of a run: what is decided is written, then acted on; what was decided is acted on again.

Replay. A checkpoint after S optimizer steps is older than the journal. Records up to the commit of step S - 1 are
folded at once; the rest is a script. Deliveries and commits in it wait for the trainer to repeat them, one by one;
everything between them is folded on the way. When the script is used up and the last recorded version is published
again, the state is the one at the kill. Nothing is written in the meantime, so a replay can itself be killed.
"""

from collections import deque
from typing import TypeVar

from asyncrl.buffer.journal import Journal
from asyncrl.buffer.ledger import Book
from asyncrl.buffer.payloads import Payloads
from asyncrl.buffer.records import Admitted, Advanced, Committed, Delivered, Dropped, Record, Stored
from asyncrl.buffer.recovery import History
from asyncrl.errors import CheckpointError, CorruptSegmentError

Step = TypeVar("Step", Delivered, Committed)


class Timeline:
    """Book, journal and payloads, moved together."""

    def __init__(self, book: Book, journal: Journal, payloads: Payloads) -> None:
        self._book, self._journal, self._payloads = book, journal, payloads
        self._script: deque[Record] = deque()
        self._stored: dict[int, list[Stored]] = {}
        self._published = 0
        self._first_of_step: dict[int, int] = {}
        self.orphaned = False
        """Whether samples that were in flight at the kill have nobody who generates them."""

    @property
    def replaying(self) -> bool:
        return bool(self._script) or self._published < self._book.version

    def record(self, *records: Record) -> None:
        self._journal.write(*records)
        for record in records:
            self._act(record)

    def restore(self, history: History, step: int) -> None:
        """Fold up to the checkpoint after `step` optimizer steps; engines start with that version."""
        self._script, self._stored, self._published = deque(history.records), history.stored, step
        while self._script and self._book.step < step:
            self._follow()
        if self._book.step < step:
            raise CheckpointError(
                f"the checkpoint is at step {step}, but the buffer's records end in step {self._book.step}: they do "
                f"not belong together, or the records were lost with the machine"
            )
        self._catch_up()

    def repeat(self, kind: type[Step]) -> Step | None:
        """Act on the delivery or commit that the script has next; None when there is no script."""
        if not self._script:
            return None
        record = self._script[0]
        if not isinstance(record, kind):
            raise CorruptSegmentError(f"{record} was recorded where the trainer asks for {kind.__name__}")
        self._follow()
        self._catch_up()
        return record

    def publish(self, version: int) -> None:
        self._published = max(self._published, version)
        if not self._script and self._published > self._book.version:
            self.record(Advanced(self._published))

    def first_needed(self, step: int) -> int:
        """The first sequence of the log that a run needs which resumes after `step` optimizer steps."""
        self._first_of_step = {s: first for s, first in self._first_of_step.items() if s >= step}
        return min([self._payloads.first_sequence(self._payloads.groups()), *self._first_of_step.values()])

    def _follow(self) -> None:
        record = self._script.popleft()
        try:
            self._act(record)
        except KeyError as error:  # its checksum is right, so this is no accident
            raise CorruptSegmentError(f"{record} does not follow from the records before it") from error

    def _act(self, record: Record) -> None:
        """Apply a record to the book, and let go of the payloads whose group it ends."""
        if isinstance(record, Committed):
            self._first_of_step[record.step] = self._payloads.first_sequence(self._book.delivered)
            for group in self._book.delivered:
                self._payloads.forget(group)
        elif isinstance(record, Dropped):
            self._payloads.forget(record.group)
        self._book.apply(record)
        if isinstance(record, Admitted):
            for stored in self._stored.pop(record.group, ()):
                self._book.apply(stored)

    def _catch_up(self) -> None:
        while self._script and not isinstance(self._script[0], Delivered | Committed):
            self._follow()
        if not self._script:
            self.orphaned = self._book.num_complete < len(self._book.waiting)
            self.publish(self._published)
