"""Where every slot of a run is, by id: the journal folded once more, apart from the buffer's own ledger.

A group is admitted, then delivered whole or dropped for a reason; what is delivered is consumed by the step that takes
it. `follow` refuses a record that cannot come next, and after each one the sums of the buffer's ledger must be the sums
of the ids that are kept here.
"""

from collections import Counter

import msgspec

from asyncrl.buffer.journal import (
    Admitted,
    Advanced,
    Asked,
    Begun,
    Committed,
    Delivered,
    Dropped,
    Failed,
    Folded,
    Late,
    Limited,
    Measured,
    Record,
    Renewed,
    Stored,
)
from asyncrl.buffer.ledger import Ledger, LedgerRules
from asyncrl.drop_reasons import DropReason
from asyncrl.observe.audit.evidence import DamageError
from asyncrl.types import LedgerCounts, Slot

Samples = dict[int, dict[int, Stored]]
"""By group and sample."""


class Accounts:
    def __init__(self, first: Begun | Folded, samples: Samples, *, pruned: bool) -> None:
        """`first`: the record that the journal begins with. `pruned`: the oldest trajectories were deleted, so those of
        ended groups may be missing."""
        self.rules = first.begun if isinstance(first, Folded) else first
        self.step = self.version = self.admitted = 0
        self.waiting: set[int] = set()
        self.delivered: dict[int, list[int]] = {}
        """Groups by step, in the order of their delivery."""
        self.consumed = 0
        """Slots of the steps that are committed."""
        self.first_step = 0
        """The journal has no records of the steps before it."""
        self._ended_before, self._waited = 0, frozenset[int]()
        self.consumed_before = 0
        """Of these, slots of steps before the first record."""
        self.dropped: dict[int, Dropped] = {}
        self.failed: dict[int, dict[int, str]] = {}
        """Samples that groups are trained on without, by group, with the reason."""
        self._drops: Counter[str] = Counter()
        self._samples, self._pruned = samples, pruned
        self._late: set[Slot] = set()
        self._ledger = Ledger(_rules(self.rules))
        if isinstance(first, Folded):
            self._begin_with(first)

    def _begin_with(self, first: Folded) -> None:
        self.step, self.version, self.admitted = first.step, first.version, first.next_group
        self.first_step, self._ended_before = first.step, first.next_group
        self.waiting = {each.group for each in first.waiting}
        self._waited = frozenset(self.waiting)
        self.consumed = self.consumed_before = first.consumed
        self.dropped = {end.group: end for end in first.ended}
        self.failed = {each.group: dict(each.failed) for each in first.waiting}
        for end in first.failed:
            self.failed.setdefault(end.group, {})[end.sample] = end.reason
        self._drops = Counter(first.drops)
        self._late = {Slot(*slot) for slot in first.late}
        self._compare(first)

    def follow(self, record: Record) -> None:
        """Act on the next record of the journal, or raise DamageError with what is wrong with it."""
        match record:
            case Begun():
                raise DamageError("a journal begins once")
            case Admitted():
                self._admit(record)
            case Asked(group):
                if group != self.admitted:
                    raise DamageError(f"a prompt is chosen for group {group} where {self.admitted} comes next")
            case Measured(step):
                if step > self.step:
                    raise DamageError(f"groups of step {step} are measured in step {self.step}")
            case Renewed(group):
                self._require_waiting(group)
            case Dropped():
                self._drop(record)
            case Failed():
                self._fail(record)
            case Late(group, sample):
                self._be_late(Slot(group, sample))
            case Delivered(step, groups):
                self._deliver(step, groups)
            case Committed(step):
                self._commit(step)
            case Advanced(version):
                if not self.version < version <= self.step:
                    raise DamageError(
                        f"version {version} is served after {self.version}, with {self.step} steps committed"
                    )
                self.version = version
            case Limited(staleness):
                if not 0 <= staleness <= self.rules.max_staleness:
                    raise DamageError(f"a bound of {staleness} is beyond that of the run, {self.rules.max_staleness}")
            case Folded():
                self._require_same(record)
        self._compare(record)

    def ledger(self) -> LedgerCounts:
        buffered = sum(len(self._samples.get(group, ())) for group in self.waiting)
        held = sum(map(self.size, self.delivered.get(self.step, ())))
        return LedgerCounts(
            leased=self.admitted * self.rules.group_size,
            in_flight=sum(map(self.size, self.waiting)) - buffered,
            buffered=buffered + held,
            consumed=self.consumed,
            dropped=dict(self._drops),
        )

    def size(self, group: int) -> int:
        """Samples that it has or will have."""
        return self.rules.group_size - len(self.failed.get(group, ()))

    def ended(self, group: int) -> bool:
        """Whether it ended before the first record, which does not say how."""
        return group < self._ended_before and group not in self._waited and group not in self.dropped

    def trained_before(self, step: int) -> list[int]:
        """Groups of the steps before `step`, in the order of their training."""
        return [group for each in range(self.first_step, step) for group in self.delivered.get(each, ())]

    def _admit(self, event: Admitted) -> None:
        if event.group != self.admitted:
            raise DamageError(f"group {event.group} is admitted where {self.admitted} comes next")
        if event.version > self.version:
            raise DamageError(
                f"group {event.group} is admitted under version {event.version}; {self.version} is served"
            )
        self.admitted += 1
        self.waiting.add(event.group)

    def _drop(self, event: Dropped) -> None:
        self._require_waiting(event.group)
        self.waiting.remove(event.group)
        self.dropped[event.group] = event
        for sample in range(self.rules.group_size):
            if sample not in self.failed.get(event.group, ()):
                self._drops[event.reason if event.sample in (-1, sample) else str(DropReason.GROUP_INCOMPLETE)] += 1
        if event.sample >= 0:
            self._late.add(Slot(event.group, event.sample))

    def _fail(self, event: Failed) -> None:
        self._require_waiting(event.group)
        slot = Slot(event.group, event.sample)
        if event.sample in self._samples.get(event.group, {}):
            raise DamageError(f"{slot} has failed, but its trajectory is stored")
        if event.sample in self.failed.setdefault(event.group, {}):
            raise DamageError(f"{slot} has failed for the second time")
        self.failed[event.group][event.sample] = event.reason
        self._drops[event.reason] += 1
        if event.tokens:
            self._late.add(slot)

    def _be_late(self, slot: Slot) -> None:
        if slot.group not in self.dropped and slot.sample not in self.failed.get(slot.group, ()):
            raise DamageError(f"{slot} is late, but its group was not dropped")
        if slot in self._late:
            raise DamageError(f"{slot} is late for the second time")
        self._late.add(slot)

    def _deliver(self, step: int, groups: tuple[int, ...]) -> None:
        if step != self.step:
            raise DamageError(f"groups {groups} are delivered for step {step} in step {self.step}")
        for group in groups:
            self._require_waiting(group)
            self._require_trainable(group)
            self.waiting.remove(group)
        self.delivered.setdefault(step, []).extend(groups)
        if len(self.delivered[step]) > self.rules.groups_per_step:
            raise DamageError(f"step {step} got {len(self.delivered[step])} groups of {self.rules.groups_per_step}")

    def _commit(self, step: int) -> None:
        taken = len(self.delivered.get(step, ()))
        if step != self.step or taken != self.rules.groups_per_step:
            raise DamageError(
                f"step {step} is committed in step {self.step} with {taken} of {self.rules.groups_per_step} groups"
            )
        self.consumed += sum(map(self.size, self.delivered[step]))
        self.step += 1

    def _require_waiting(self, group: int) -> None:
        if group in self.waiting:
            return
        if group in self.dropped:
            raise DamageError(f"group {group} was dropped before, for {self.dropped[group].reason}")
        if group < self.admitted:
            raise DamageError(f"group {group} was delivered before: it would be trained on twice")
        raise DamageError(f"group {group} was never admitted")

    def _require_trainable(self, group: int) -> None:
        """Whole, and neither too old nor from the future."""
        samples = self._samples.get(group, {})
        if len(samples) < self.size(group):
            if self._pruned:
                return
            missing = sorted(set(range(self.rules.group_size)) - samples.keys() - self.failed.get(group, {}).keys())
            raise DamageError(f"group {group} is delivered without its samples {missing}")
        oldest = min(stored.oldest for stored in samples.values())
        if not 0 <= self.step - oldest <= self.rules.max_staleness:
            raise DamageError(
                f"group {group} holds a token of version {oldest} and is delivered at version {self.step}; allowed are "
                f"{self.rules.max_staleness} versions"
            )

    def _require_same(self, folded: Folded) -> None:
        """The state that a file of the journal begins with is the one that the files before it lead to."""
        ours = self.step, self.version, self.admitted, self.waiting, self.consumed, dict(self._drops)
        waiting = {each.group for each in folded.waiting}
        theirs = folded.step, folded.version, folded.next_group, waiting, folded.consumed, folded.drops
        if ours != theirs:
            raise DamageError(f"the folded state is {theirs}, but the records before it lead to {ours}")

    def _compare(self, record: Record) -> None:
        """The buffer's own sums, folded from the same records, against the ids kept here."""
        begins = isinstance(record, Folded) and not self._ledger.next_group
        self._ledger.apply(record)
        if isinstance(record, Admitted):
            self._store(record.group)
        elif isinstance(record, Folded) and begins:
            for each in record.waiting:
                self._store(each.group)
        ours, theirs = self.ledger(), self._ledger.counts()
        if not ours.balanced or ours != theirs:
            raise DamageError(
                f"the sums are {msgspec.to_builtins(ours)} by id, but {msgspec.to_builtins(theirs)} in the ledger"
            )

    def _store(self, group: int) -> None:
        for stored in self._samples.get(group, {}).values():
            self._ledger.apply(stored)


def _rules(begun: Begun) -> LedgerRules:
    """Those that sums do not depend on are open."""
    return LedgerRules(
        group_size=begun.group_size,
        groups_per_step=begun.groups_per_step,
        max_staleness=begun.max_staleness,
        group_timeout_s=float("inf"),
        max_bytes=1 << 62,
        sample_bytes=0,
    )
