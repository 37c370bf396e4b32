"""The trajectory buffer: a ledger of what is where, a journal of its decisions, and a log of trajectories.

Guarantees, by durability level (`memory`: nothing survives; `process`: kill -9; `disk`: power loss; the loss of a node
only if the directory is on shared storage):

- an acknowledged trajectory is never lost, and a slot is filled at most once, whoever retries;
- a group is delivered whole, or its end is recorded with a reason;
- nothing older than the staleness bound is delivered (see `ledger`), and memory is bounded in bytes;
- leased (slots for which a ticket was issued) = in flight + buffered + consumed + dropped, at every moment;
- a resumed run is delivered exactly what was delivered after its checkpoint, in the same order and grouping.

Every decision is written before it takes effect, and recovery folds what was written through the same `Ledger`, so
there is one code path. Synchronous and single-threaded; waiting and the clock belong to `actors.buffer`.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from asyncrl.buffer.journal import FILE_BYTES, Admitted, Committed, Delivered, Dropped, Journal, Limited, Renewed
from asyncrl.buffer.ledger import NEVER, Ledger, LedgerRules, Refusal
from asyncrl.buffer.log import lock_directory
from asyncrl.buffer.payloads import Payloads, open_log
from asyncrl.buffer.replay import JournaledLedger, Sample, check, read_history
from asyncrl.buffer.retention import Cursors, Pruning
from asyncrl.config import Buffer
from asyncrl.curriculum.policy import Curriculum
from asyncrl.drop_reasons import DropReason, find
from asyncrl.errors import ConfigError
from asyncrl.types import BufferStatus, Delivery, LedgerCounts, Receipt, Slot, Ticket

TRAINER = "trainer"
SAMPLE_BYTES = 1 << 16


class TrajectoryBuffer:
    """See the module. While a resumed run repeats recorded steps (`replaying`), only take, read, commit and advance
    are served; nothing is written, so that it can be killed and resumed again."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        settings: Buffer,
        *,
        group_size: int,
        groups_per_step: int,
        max_staleness: int,
        group_timeout_s: float,
        total_steps: int | None = None,
        restore_step: int | None = None,
        sample_bytes: int = SAMPLE_BYTES,
        max_ready: int = 0,
        drop_uninformative: bool = False,
        incomplete_min: int = 0,
        journal_bytes: int = FILE_BYTES,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`restore_step`: optimizer steps in the checkpoint that is resumed from; engines are expected to start with
        that version. `max_ready`: see `limit`. `journal_bytes`: see `journal`. `curriculum`: chooses
        the prompts. For the others see `LedgerRules`."""
        self._rules = LedgerRules(
            group_size=group_size,
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            group_timeout_s=group_timeout_s,
            max_bytes=settings.max_bytes,
            sample_bytes=sample_bytes,
            total_steps=total_steps,
            drop_uninformative=drop_uninformative,
            incomplete_min=incomplete_min,
        )
        self._max_ready = max_ready
        self._oldest_checkpoint = 0
        self._directory = directory
        home = None if settings.durability == "memory" else directory
        self._lock = lock_directory(home) if home else None
        self._log = open_log(home, run_id, settings) if home else None
        self._journal = Journal(home, run_id=run_id, sync=settings.durability == "disk", file_bytes=journal_bytes)
        self._settings = settings
        self._payloads = Payloads(self._log)
        self._ledger = Ledger(self._rules, curriculum)
        self._journaled = JournaledLedger(self._ledger, self._journal, self._payloads)
        with ExitStack() as undo:
            undo.callback(self._unlock)
            self._restore(restore_step)
            undo.pop_all()

    # -- producers -----------------------------------------------------------------------------------------------

    def admit(self, now: float) -> Ticket | Refusal:
        """Issue a ticket, which reserves the slots of a new group, or say what admission waits for."""
        decision = self._admission(now)
        if isinstance(decision, Refusal):
            if decision.lacking and self._ledger.idle:
                raise ConfigError(
                    f"buffer.max_bytes={self._rules.max_bytes} cannot hold one step of {self._rules.groups_per_step} "
                    f"groups of {decision.lacking} bytes: set it to {self._rules.groups_per_step * decision.lacking}"
                )
            return decision
        self._journaled.record(*self._ledger.ask(), decision)
        return self._ticket(decision.group)

    def append(self, payload: bytes) -> Receipt:
        return self.append_many([payload])[0]

    def append_many(self, batch: Sequence[bytes]) -> list[Receipt]:
        """Store trajectories with one write; a slot that is already filled, or whose group has ended, is not."""
        return self.append_checked(self.check(batch))

    def check(self, batch: Sequence[bytes]) -> list[Sample]:
        """Decode payloads and check that tickets were issued for their slots, or raise ValueError; stores nothing."""
        self._require_live("append")
        samples = [check(payload) for payload in batch]
        for sample in samples:
            self._ledger.status(sample.slot)
        return samples

    def append_checked(self, samples: Sequence[Sample]) -> list[Receipt]:
        receipts: list[Receipt] = []
        fresh: dict[Slot, Sample] = {}
        for sample in samples:
            status = self._ledger.status(sample.slot)
            receipts.append(Receipt(sample.slot, "duplicate" if sample.slot in fresh else status))
            if status == "stored":
                fresh.setdefault(sample.slot, sample)
            elif status == "dropped":
                self._waste(sample.slot, sample.tokens)
        if fresh:
            self._payloads.put([(sample.slot, sample.payload) for sample in fresh.values()])
        for sample in fresh.values():
            self._ledger.apply(sample.stored(self._ledger.waiting[sample.slot.group].version))
        return receipts

    def fail(self, slot: Slot, reason: str, tokens: int = 0) -> Receipt:
        """End a slot without a trajectory, and with it its group, unless the others are enough to be trained on."""
        self._require_live("fail")
        if find(reason) is None:  # it would be in the journal for ever, and nobody could look it up
            raise ValueError(f"{reason!r} is no reason for a drop: use DropReason, or stage_reason(name)")
        status = self._ledger.status(slot)
        if status == "stored":
            self._journaled.record(self._ledger.failure(slot, reason, tokens))
        elif status == "dropped":
            self._waste(slot, tokens)
        return Receipt(slot, "duplicate" if status == "duplicate" else "dropped")

    def expire(self, now: float) -> tuple[int, ...]:
        """Drop groups past their deadline, or what is missing of them, and complete groups that are uninformative;
        returns which."""
        if self.replaying:
            return ()
        # Until `reissue` sets new deadlines, those of incomplete groups are the killed run's.
        overdue = [] if self._journaled.orphaned else self._ledger.overdue(now)
        self._journaled.record(*overdue)
        uninformative = self._ledger.uninformative()
        self._journaled.record(*uninformative)
        return tuple(dict.fromkeys(record.group for record in (*overdue, *uninformative)))

    def awaits(self, slot: Slot) -> bool:
        """Whether a trajectory for it would be stored."""
        return self._ledger.status(slot) == "stored"

    def awaited(self, groups: Collection[int]) -> dict[int, tuple[int, ...]] | None:
        """The samples that are still to be stored, of those groups that lack any. None in a replay: it is not known
        before its end."""
        if self.replaying:
            return None
        waiting = (group for group in groups if group in self._ledger.waiting)
        return {group: missing for group in waiting if (missing := self._ledger.missing(group))}

    def reissue(self, now: float, of: Collection[int] | None = None) -> list[Ticket]:
        """New tickets, with new deadlines, for what is missing of all groups, or of some, whose process was killed."""
        self._require_live("reissue")
        self.limit(self._ledger.bound, self._max_ready)  # that of the run may be tighter now
        among = self._ledger.waiting if of is None else [group for group in of if group in self._ledger.waiting]
        groups = [group for group in among if not self._ledger.complete(group)]
        self._journaled.record(*(Renewed(group, now + self._rules.group_timeout_s) for group in groups))
        self._journaled.orphaned = False
        return [self._ticket(group) for group in groups]

    # -- the trainer ---------------------------------------------------------------------------------------------

    def take(self, max_groups: int, min_groups: int = 1) -> Delivery | None:
        """Complete groups for the present step, or None.

        At least `min_groups`, unless the step lacks fewer or its other capacity is reserved for stragglers in their
        last step. In a replay it is the next recorded delivery, whatever its size.
        """
        step = self._ledger.step
        if not (capacity := self._ledger.capacity(step)):
            raise ValueError(f"step {step} has all its groups; commit it before taking more")
        if event := self._journaled.repeat(Delivered):
            return Delivery(step=event.step, groups=event.groups, replayed=True)
        enough = min(min_groups, max_groups, capacity)
        if self._ledger.num_complete < enough:
            return None
        choice = self._ledger.choice(max_groups)
        self._journaled.record(*(Dropped(group, DropReason.STALE) for group in choice.stale))
        if len(choice.groups) < (1 if choice.reserved else enough):
            return None
        self._journaled.record(Delivered(step, choice.groups))
        return Delivery(step=step, groups=choice.groups)

    @property
    def lacks_fresh(self) -> bool:
        """Whether more groups, or faster ones, would be taken now; if not, the step waits for its stragglers."""
        return self._ledger.lacks_fresh

    def read(self, delivery: Delivery) -> list[bytes]:
        """The payloads of a delivery that is not yet committed, by group and sample."""
        delivered, samples = self._ledger.delivered, range(self._rules.group_size)
        return [
            self._payloads.get(Slot(group, sample))
            for group in delivery.groups
            for sample in samples
            if group not in delivered or sample not in delivered[group].failed
        ]

    def commit(self, step: int) -> None:
        """The optimizer has taken `step`: its groups are consumed. Repeating it is harmless."""
        if step < self._ledger.step:
            return
        if step > self._ledger.step or self._ledger.capacity(step):
            taken = f"{len(self._ledger.delivered)} of {self._rules.groups_per_step} groups"
            raise ValueError(f"step {step} cannot be committed: step {self._ledger.step} has taken {taken}")
        if not self._journaled.repeat(Committed):
            self._journaled.record(Committed(step))

    def advance(self, version: int) -> None:
        """Engines serve `version` from now on. Repeating it is harmless."""
        if version > self._ledger.step:
            raise ValueError(f"version {version} cannot be published: only {self._ledger.step} steps are committed")
        self._journaled.publish(version)

    def limit(self, staleness: int, max_ready: int) -> None:
        """Admit under this bound from now on, if the run's own is not tighter, and nothing while `max_ready` groups are
        complete or just begun, unless it is 0. A replay repeats what was recorded."""
        self._max_ready = max_ready
        bound = min(staleness, self._rules.max_staleness)
        if bound != self._ledger.bound and not self.replaying:
            self._journaled.record(Limited(bound))

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether recorded deliveries, commits or publications are still to be repeated."""
        return self._journaled.replaying

    @property
    def next_deadline(self) -> float:
        """When `expire` next has something to do."""
        return NEVER if self.replaying or self._journaled.orphaned else self._ledger.next_deadline

    @property
    def torn_bytes(self) -> int:
        """Bytes of unfinished, never acknowledged writes that were cut off when the directory was opened."""
        return self._journal.torn_bytes + (self._log.torn_bytes if self._log else 0)

    def ledger(self) -> LedgerCounts:
        return self._ledger.counts()

    def waste(self) -> dict[str, int]:
        """Sampled tokens that were not trained on, by the reason of their drop."""
        return dict(self._ledger.waste)

    def status(self) -> BufferStatus:
        admission = self._admission(now=0.0)
        refusal = admission.reason if isinstance(admission, Refusal) else ""
        return self._ledger.situation(replaying=self.replaying, refusal=refusal)

    # -- files ---------------------------------------------------------------------------------------------------

    def checkpointed(self, step: int) -> None:
        """The oldest checkpoint that the run may be resumed from has `step` optimizer steps: move the trainer's cursor
        to what it needs, and never back."""
        self._oldest_checkpoint = step
        if (needed := self._journaled.first_needed(step)) > Cursors(self._directory).all().get(TRAINER, -1):
            self.move_cursor(TRAINER, needed)

    def move_cursor(self, consumer: str, sequence: int) -> None:
        """Note durably that `consumer` needs nothing before `sequence`."""
        if self._log:
            Cursors(self._directory).move(consumer, sequence)

    def prune(self) -> Pruning:
        """Delete what `buffer.keep` does not keep: sealed trajectory files that every consumer's durable cursor is
        past, then files of the journal that only tell of such."""
        if not self._log or self._settings.keep == "all":
            return Pruning()
        oldest, limit = self._oldest_checkpoint, Cursors(self._directory).lowest()
        if (steps := self._settings.kept_steps) is not None:
            oldest = max(min(oldest, self._ledger.step - steps), 0)
            limit = min(limit, self._journaled.first_needed(oldest))
        if (most := self._settings.kept_bytes) is not None:
            limit = min(limit, self._log.first_within(most))
        self._journaled.forget(oldest)
        found = self._log.prune(limit)
        begins = self._log.first_kept
        found += self._journal.prune(lambda folded: folded.step <= oldest and folded.first_sequence <= begins)
        return Pruning([path.name for path, _ in found], sum(size for _, size in found))

    def close(self) -> None:
        """Seal the files and unlock the directory; idempotent."""
        if self._lock is not None:
            self._journal.close()
            if self._log:
                self._log.seal()
            self._unlock()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _waste(self, slot: Slot, tokens: int) -> None:
        """Count what was sampled for a group that had already been dropped."""
        if tokens and (late := self._ledger.late(slot, tokens)):
            self._journaled.record(late)

    def _restore(self, step: int | None) -> None:
        history = read_history(self._journal, self._log, self._payloads, self._rules, step or 0)
        if not history.records:
            history.records.append(self._rules.begun)
            self._journal.write(*history.records)
        elif step is None:
            raise ConfigError(f"{self._directory} already holds a run; resume it, or choose another name")
        self._journaled.restore(history, step or 0)

    def _admission(self, now: float) -> Admitted | Refusal:
        if self.replaying:
            return Refusal(f"replay: the recorded step {self._ledger.step} is being repeated")
        if self._journaled.orphaned:
            return Refusal("resume: the samples that were in flight get new tickets first")
        return self._ledger.admission(now, self._max_ready)

    def _ticket(self, group: int) -> Ticket:
        admitted, missing = self._ledger.waiting[group], self._ledger.missing(group)
        return Ticket(
            group=group,
            samples=missing,
            version=admitted.version,
            deadline=admitted.deadline,
            prompt=admitted.prompt,
        )

    def _require_live(self, call: str) -> None:
        if self.replaying:
            raise ValueError(f"{call} during the replay of step {self._ledger.step}: no ticket has been issued yet")
