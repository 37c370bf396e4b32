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
    Begun,
    Committed,
    Delivered,
    Dropped,
    Late,
    Limited,
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
    def __init__(self, begun: Begun, samples: Samples, *, pruned: bool) -> None:
        """`pruned`: the oldest trajectories were deleted, so those of ended groups may be missing."""
        self.rules = begun
        self.step = 0
        self.version = 0
        self.admitted = 0
        self.waiting: set[int] = set()
        self.delivered: dict[int, list[int]] = {}
        """Groups by step, in the order of their delivery."""
        self.consumed = 0
        """Slots of the steps that are committed."""
        self.dropped: dict[int, Dropped] = {}
        self._drops: Counter[str] = Counter()
        self._samples, self._pruned = samples, pruned
        self._late: set[Slot] = set()
        self._ledger = Ledger(_rules(begun))

    def follow(self, record: Record) -> None:
        """Act on the next record of the journal, or raise DamageError with what is wrong with it."""
        match record:
            case Begun():
                raise DamageError("a journal begins once")
            case Admitted():
                self._admit(record)
            case Renewed(group):
                self._require_waiting(group)
            case Dropped():
                self._drop(record)
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
        self._compare(record)

    def ledger(self) -> LedgerCounts:
        size = self.rules.group_size
        buffered = sum(len(self._samples.get(group, ())) for group in self.waiting)
        held = size * len(self.delivered.get(self.step, ()))
        return LedgerCounts(
            leased=self.admitted * size,
            in_flight=size * len(self.waiting) - buffered,
            buffered=buffered + held,
            consumed=self.consumed,
            dropped=dict(self._drops),
        )

    def trained_before(self, step: int) -> list[int]:
        """Groups of the steps before `step`, in the order of their training."""
        return [group for each in range(step) for group in self.delivered.get(each, ())]

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
            self._drops[event.reason if event.sample in (-1, sample) else str(DropReason.GROUP_INCOMPLETE)] += 1
        if event.sample >= 0:
            self._late.add(Slot(event.group, event.sample))

    def _be_late(self, slot: Slot) -> None:
        if slot.group not in self.dropped:
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
        self.consumed += taken * self.rules.group_size
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
        if len(samples) < self.rules.group_size:
            if self._pruned:
                return
            missing = sorted(set(range(self.rules.group_size)) - samples.keys())
            raise DamageError(f"group {group} is delivered without its samples {missing}")
        oldest = min(stored.oldest for stored in samples.values())
        if not 0 <= self.step - oldest <= self.rules.max_staleness:
            raise DamageError(
                f"group {group} holds a token of version {oldest} and is delivered at version {self.step}; allowed are "
                f"{self.rules.max_staleness} versions"
            )

    def _compare(self, record: Record) -> None:
        """The buffer's own sums, folded from the same records, against the ids kept here."""
        self._ledger.apply(record)
        if isinstance(record, Admitted):
            for stored in self._samples.get(record.group, {}).values():
                self._ledger.apply(stored)
        ours, theirs = self.ledger(), self._ledger.counts()
        if not ours.balanced or (ours != theirs and not self._pruned):
            raise DamageError(
                f"the sums are {msgspec.to_builtins(ours)} by id, but {msgspec.to_builtins(theirs)} in the ledger"
            )


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
