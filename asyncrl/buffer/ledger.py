"""The ledger of a run: who may generate, what may be trained on, and where every slot is. Pure: no files, no clock.

`LedgerRules` are the constants, `Ledger` folds the events of `journal` into the state and decides from it.

Definitions. P groups make a step. `step` is the step being assembled; it trains the weights of version `step`. Engines
serve `version <= step`. `taken` groups of the step are delivered. A group waits from its admission until it is
delivered or dropped. A group admitted at version v under the staleness bound k *expires* at step v + k, or with the
group before it if that is later: it must be trained at that step or before. k may change between admissions and is at
most K, the staleness bound of the run; so is every expiry - v.

Proof that staleness never exceeds K. Let capacity(d) = (d - step + 1) * P - taken, the groups that can still be
delivered up to step d, and due(d) the number of waiting groups that expire at d or before. The invariant is

    due(d) <= capacity(d)    for every d >= step                                                            (I)

- Admission adds a group of the latest expiry e >= version + k, so only d >= e changes, and there due(d) is the number
  of all waiting groups. It is granted iff waiting + 1 <= capacity(version + k) <= capacity(e), which keeps (I).
- Delivery of a group of expiry e takes one from capacity(d) everywhere, and one from due(d) for d >= e. It is granted
  iff due(d) <= capacity(d) - 1 for each d in [step, e - 1], which keeps (I).
- Commit happens at taken = P: step + 1 with taken = 0 leaves capacity(d) as it was. Drops only lower due(d).

At the end of step s, capacity(s) = 0, hence due(s) = 0: every group that expires at s has been trained or dropped. So
no group is trained after its expiry; no token of it is older than v; staleness never exceeds K. With k = 0 a group is
admitted only for the step of its own version: synchronous. Inside these limits groups are delivered in any order, so
a straggler is overtaken as long as every group can still be trained in time, and capacity is reserved for it only in
its last step, until it completes or its deadline drops it. There is no deadlock: while version + k >= step, either
P - taken groups wait, or one more is admitted. `max_ready` admits later than that, but never while fewer groups than
the trainer takes at a time are complete or being generated.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec

from asyncrl.buffer.journal import (
    Admitted,
    Advanced,
    Asked,
    Begun,
    Committed,
    Delivered,
    Dropped,
    Event,
    Failed,
    Folded,
    FoldedGroup,
    Late,
    Limited,
    Measured,
    Record,
    Renewed,
    Stored,
)
from asyncrl.curriculum.policy import Curriculum
from asyncrl.drop_reasons import DropReason
from asyncrl.types import BufferStatus, LedgerCounts, Slot

NEVER = float("inf")
RECENT_GROUPS = 1024
"""Newest groups, at least, whose end is remembered: later than that no sample of them arrives any more."""


class LedgerRules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the arithmetic, set once."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    """Of a resumed run it may be less than the bound that it began with."""
    group_timeout_s: float
    max_bytes: int
    sample_bytes: int
    """First estimate of the size of a sample; replaced by the largest stored one when that is larger."""
    total_steps: int | None = None
    """Steps of the run: nothing is admitted that they cannot train on; None for a run without an end."""
    drop_uninformative: bool = False
    """Drop a group whose samples all earned the same reward: its advantages would be zero."""
    incomplete_min: int = 0
    """Samples that a group is trained on with at least, if others fail; 0: only whole groups are trained on."""

    @property
    def needed(self) -> int:
        """Samples without which a group is dropped."""
        return min(self.incomplete_min or self.group_size, self.group_size)

    @property
    def begun(self) -> Begun:
        return Begun(self.group_size, self.groups_per_step, self.max_staleness)


class AdmittedGroup(msgspec.Struct):
    """A group that waits, or that the trainer holds until the commit."""

    version: int
    expiry: int
    """The last step that may train on it."""
    deadline: float
    sample_bytes: int
    samples: dict[int, Stored] = msgspec.field(default_factory=dict[int, Stored])
    failed: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    """Samples that it is trained on without, with the reason."""
    prompt: int = -1
    """That a curriculum chose; -1: the one of the group's own number."""

    @property
    def reward(self) -> float:
        """Mean of those that are stored."""
        return sum(stored.reward for stored in self.samples.values()) / len(self.samples)

    @property
    def uninformative(self) -> bool:
        """No sample was better than another; meaningful for complete groups."""
        samples = self.samples.values()
        return len({stored.reward for stored in samples}) == 1 and not any(stored.uneven for stored in samples)


class Refusal(NamedTuple):
    """Why no group is admitted now."""

    reason: str
    lacking: int = 0
    """Bytes that a group needs, where memory is the reason."""


class Choice(NamedTuple):
    """What a take would do: drop the stale groups, deliver the others."""

    stale: tuple[int, ...]
    groups: tuple[int, ...]
    reserved: bool
    """Further complete groups must wait: the remaining capacity is reserved for groups that expire before them."""


class Ledger:
    """State and decisions. Only `apply` changes the state; a decision never does."""

    def __init__(self, rules: LedgerRules, curriculum: Curriculum | None = None) -> None:
        self.rules = rules
        self._curriculum = curriculum
        self._asked: Asked | None = None
        """For the group that is admitted next."""
        self.step = 0
        self.version = 0
        self.next_group = 0
        self.bytes = 0
        """Held by stored samples and reserved for missing ones, of all groups not yet consumed."""
        self.waste: Counter[str] = Counter()
        self.waiting: dict[int, AdmittedGroup] = {}
        """Groups not yet delivered, in order of admission."""
        self.num_complete = 0
        """How many of them have all their samples."""
        self.delivered: dict[int, AdmittedGroup] = {}
        """Groups of the present step that the trainer holds."""
        self.bound = rules.max_staleness
        """Staleness bound of new groups."""
        self._latest_expiry = 0
        self._uninformative: set[int] = set()
        self._dropped: dict[int, Dropped] = {}
        self._failed: dict[Slot, Failed] = {}
        self._late: set[Slot] = set()
        self._due: Counter[int] = Counter()
        self._first_due: int | None = None  # cached by `next_deadline`
        self._sample_bytes = rules.sample_bytes
        self._in_flight = self._buffered = self._consumed = 0
        self._drops: Counter[str] = Counter()

    # -- views ---------------------------------------------------------------------------------------------------

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            leased=self.next_group * self.rules.group_size,
            in_flight=self._in_flight,
            buffered=self._buffered,
            consumed=self._consumed,
            dropped=dict(self._drops),
        )

    def situation(self, *, replaying: bool, refusal: str) -> BufferStatus:
        oldest = next((group for group in self.waiting if not self.complete(group)), None)
        return BufferStatus(
            step=self.step,
            version=self.version,
            taken=len(self.delivered),
            complete=self.num_complete,
            incomplete=len(self.waiting) - self.num_complete,
            bytes=self.bytes,
            replaying=replaying,
            oldest_group=oldest,
            missing=() if oldest is None else self.missing(oldest),
            refusal=refusal,
        )

    def capacity(self, step: int) -> int:
        """Groups that can still be delivered up to and including `step`."""
        return (step - self.step + 1) * self.rules.groups_per_step - len(self.delivered)

    def missing(self, group: int) -> tuple[int, ...]:
        waiting = self.waiting[group]
        return tuple(i for i in range(self.rules.group_size) if i not in waiting.samples and i not in waiting.failed)

    def complete(self, group: int) -> bool:
        """It has all the samples that it can still have."""
        return len(self.waiting[group].samples) == self._expected(self.waiting[group])

    def _expected(self, admitted: AdmittedGroup) -> int:
        return self.rules.group_size - len(admitted.failed)

    @property
    def idle(self) -> bool:
        """Nothing is being generated, and what is here does not make a step."""
        return not self._in_flight and len(self.waiting) + len(self.delivered) < self.rules.groups_per_step

    @property
    def feasible(self) -> bool:
        """Invariant (I)."""
        due = 0
        for expiry in sorted(self._due):
            due += self._due[expiry]
            if due > self.capacity(expiry):
                return False
        return True

    # -- decisions -----------------------------------------------------------------------------------------------

    def admission(self, now: float, max_ready: int = 0) -> Admitted | Refusal:
        """Nothing is admitted while `max_ready` groups are complete or just begun; 0 for no such limit."""
        last, total = self.version + self.bound, self.rules.total_steps
        capacity = self.capacity(last if total is None else min(last, total - 1))
        if len(self.waiting) >= capacity:
            unpublished = f", version {self.step} is not published" if self.version < self.step else ""
            return Refusal(f"staleness: {len(self.waiting)} groups wait to be trained{unpublished}")
        if 0 < max_ready <= (ready := self._soon_ready()):
            return Refusal(f"freshness: {ready} groups are complete or just begun, enough for the trainer")
        need, limit = self.rules.group_size * self._sample_bytes, self.rules.max_bytes
        if self.bytes + need > limit:
            return Refusal(f"memory: {self.bytes} of {limit} bytes are held or reserved, a group needs {need}", need)
        return Admitted(self.next_group, self.version, now + self.rules.group_timeout_s, self._sample_bytes)

    def ask(self) -> tuple[Asked, ...]:
        """The prompt of the group that is admitted next; nothing without a curriculum."""
        return () if self._curriculum is None else (Asked(self.next_group, *self._curriculum.choose()),)

    def measured(self, records: Sequence[Record]) -> Iterator[Measured]:
        """What these records, which end groups, are to teach the curriculum."""
        for record in records if self._curriculum is not None else ():
            if isinstance(record, Committed):
                # By number: in which order a step's groups were delivered is a matter of time.
                yield self._outcome(sorted(self.delivered.items()))
            elif isinstance(record, Dropped) and self.complete(record.group):
                yield self._outcome([(record.group, self.waiting[record.group])])

    def _outcome(self, ended: Sequence[tuple[int, AdmittedGroup]]) -> Measured:
        known = [each for each in ended if each[1].samples]
        prompts = tuple(group if each.prompt < 0 else each.prompt for group, each in known)
        return Measured(self.step, prompts, tuple(each.reward for _, each in known))

    def status(self, slot: Slot) -> Literal["stored", "duplicate", "dropped"]:
        """What an append to `slot` would lead to."""
        if not (0 <= slot.group < self.next_group and 0 <= slot.sample < self.rules.group_size):
            raise ValueError(
                f"no ticket was issued for {slot}: {self.next_group} groups of {self.rules.group_size} were admitted"
            )
        if slot.group in self._dropped or slot in self._failed:
            return "dropped"
        group = self.waiting.get(slot.group)
        return "duplicate" if group is None or slot.sample in group.samples else "stored"

    def late(self, slot: Slot, tokens: int) -> Late | None:
        """The record of a sample that arrived after it or its group was given up; None for the second time."""
        return None if slot in self._late else Late(slot.group, slot.sample, tokens)

    def failure(self, slot: Slot, reason: str, tokens: int) -> Dropped | Failed:
        """What the failure of a sample means for its group."""
        if self._expected(self.waiting[slot.group]) > self.rules.needed:
            return Failed(slot.group, slot.sample, reason, tokens)
        return Dropped(slot.group, reason, slot.sample, tokens)

    def overdue(self, now: float) -> list[Dropped | Failed]:
        """Incomplete groups past their deadline, or what is missing of them if the rest is enough."""
        if now < self.next_deadline:  # called after every append: groups are searched only when one is due
            return []
        found: list[Dropped | Failed] = []
        for group, admitted in self.waiting.items():
            if admitted.deadline <= now and not self.complete(group):
                if len(admitted.samples) >= self.rules.needed:
                    found += [Failed(group, sample, DropReason.TIMEOUT) for sample in self.missing(group)]
                else:
                    found.append(Dropped(group, DropReason.TIMEOUT))
        return found

    def uninformative(self) -> list[Dropped]:
        """Complete groups without a learning signal, where the rules drop them."""
        return [Dropped(group, DropReason.UNINFORMATIVE) for group in sorted(self._uninformative)]

    @property
    def next_deadline(self) -> float:
        """The first deadline of the incomplete groups; the group is cached: this is called after every append."""
        if self._first_due is None or self._first_due not in self.waiting or self.complete(self._first_due):
            incomplete = (group for group in self.waiting if not self.complete(group))
            self._first_due = min(incomplete, key=lambda group: self.waiting[group].deadline, default=None)
        return NEVER if self._first_due is None else self.waiting[self._first_due].deadline

    def choice(self, limit: int) -> Choice:
        """The oldest complete groups, at most `limit`, that leave all others trainable in time."""
        stale, chosen, due = list[int](), list[int](), self._due.copy()
        limit = min(limit, self.capacity(self.step))
        for group, admitted in self.waiting.items():
            if len(chosen) >= limit:
                break
            if not self.complete(group):
                continue
            if self.step - min(sample.oldest for sample in admitted.samples.values()) > self.rules.max_staleness:
                stale.append(group)
            elif self._can_pass(due, admitted.expiry, len(chosen)):
                chosen.append(group)
            else:  # expiries never fall along the order of admission: if this group must wait, so must all after it
                return Choice(tuple(stale), tuple(chosen), reserved=True)
            due[admitted.expiry] -= 1
        return Choice(tuple(stale), tuple(chosen), reserved=False)

    # -- the fold ------------------------------------------------------------------------------------------------

    def folded(self, first_sequence: int) -> Folded:
        """The state between two steps, for `apply` to begin with. Stored samples are not in it: the log has them, from
        `first_sequence` on."""
        assert not self.delivered, "in the middle of a step"
        recent = self._recent()
        return Folded(
            begun=self.rules.begun,
            step=self.step,
            version=self.version,
            next_group=self.next_group,
            bound=self.bound,
            latest_expiry=self._latest_expiry,
            sample_bytes=self._sample_bytes,
            consumed=self._consumed,
            drops=dict(self._drops),
            waste=dict(self.waste),
            waiting=tuple(
                FoldedGroup(
                    group,
                    each.version,
                    each.expiry,
                    each.deadline,
                    each.sample_bytes,
                    tuple(each.failed.items()),
                    each.prompt,
                )
                for group, each in self.waiting.items()
            ),
            ended=tuple(end for group, end in self._dropped.items() if group >= recent),
            late=tuple(sorted((slot.group, slot.sample) for slot in self._late if slot.group >= recent)),
            first_sequence=first_sequence,
            failed=tuple(end for slot, end in self._failed.items() if slot.group >= recent),
            curriculum=None if self._curriculum is None else self._curriculum.state,
        )

    def apply(self, event: Event) -> None:
        match event:
            case Folded():
                self._begin_with(event) if not self.next_group else self._forget()
            case Begun(max_staleness=bound):
                self.bound = bound
            case Admitted():
                self._admit(event)
            case Asked():
                self._asked = event
            case Measured(prompts=prompts, rates=rates):
                if self._curriculum is not None:
                    self._curriculum.measure(prompts, rates)
            case Renewed(group, deadline):
                self.waiting[group].deadline = deadline
                self._first_due = None
            case Stored():
                self._store(event)
            case Dropped():
                self._drop(event)
            case Failed():
                self._fail(event)
            case Late(group, sample, tokens):
                self._late.add(Slot(group, sample))
                self.waste[self._reason(group, sample)] += tokens
            case Delivered(groups=groups):
                self._deliver(groups)
            case Committed(step):
                self._commit(step)
            case Advanced(version):
                self.version = version
            case Limited(staleness):
                self.bound = staleness

    def _begin_with(self, event: Folded) -> None:
        """What is stored of the waiting groups comes after it."""
        self.step, self.version, self.next_group = event.step, event.version, event.next_group
        self.bound, self._latest_expiry, self._sample_bytes = event.bound, event.latest_expiry, event.sample_bytes
        self._consumed, self._drops, self.waste = event.consumed, Counter(event.drops), Counter(event.waste)
        for each in event.waiting:
            self.waiting[each.group] = admitted = AdmittedGroup(
                each.version,
                each.expiry,
                each.deadline,
                each.sample_bytes,
                failed=dict(each.failed),
                prompt=each.prompt,
            )
            self._due[each.expiry] += 1
            self._in_flight += self._expected(admitted)
            self.bytes += self._held(admitted)
        self._dropped = {end.group: end for end in event.ended}
        self._failed = {Slot(end.group, end.sample): end for end in event.failed}
        self._late = {Slot(*slot) for slot in event.late}
        if self._curriculum is not None and event.curriculum is not None:
            self._curriculum.state = event.curriculum

    def _forget(self) -> None:
        """How groups ended of which nothing arrives any more."""
        recent = self._recent()
        self._dropped = {group: end for group, end in self._dropped.items() if group >= recent}
        self._failed = {slot: end for slot, end in self._failed.items() if slot.group >= recent}
        self._late = {slot for slot in self._late if slot.group >= recent}

    def _recent(self) -> int:
        window = max(RECENT_GROUPS, 4 * (self.rules.max_staleness + 1) * self.rules.groups_per_step)
        return self.next_group - window

    def _admit(self, event: Admitted) -> None:
        self._latest_expiry = max(self._latest_expiry, event.version + self.bound)
        if event.deadline < self.next_deadline:
            self._first_due = event.group
        self.waiting[event.group] = admitted = AdmittedGroup(
            event.version, self._latest_expiry, event.deadline, event.sample_bytes
        )
        if (asked := self._asked) is not None and asked.group == event.group:  # a kill may have left one without
            admitted.prompt = asked.prompt
            if self._curriculum is not None:
                self._curriculum.ask(asked.prompt, asked.drawn)
        self._due[self._latest_expiry] += 1
        self.next_group = event.group + 1
        self._in_flight += self.rules.group_size
        self.bytes += self.rules.group_size * event.sample_bytes

    def _store(self, event: Stored) -> None:
        admitted = self.waiting[event.group]
        admitted.samples[event.sample] = event
        self.bytes += event.bytes - admitted.sample_bytes
        self._sample_bytes = max(self._sample_bytes, event.bytes)
        self._in_flight -= 1
        self._buffered += 1
        self._note_complete(event.group)

    def _fail(self, event: Failed) -> None:
        admitted, slot = self.waiting[event.group], Slot(event.group, event.sample)
        admitted.failed[event.sample] = event.reason
        self._failed[slot] = event
        self.bytes -= admitted.sample_bytes
        self._in_flight -= 1
        self._drops[event.reason] += 1
        if event.tokens:
            self.waste[event.reason] += event.tokens
            self._late.add(slot)
        self._note_complete(event.group)

    def _note_complete(self, group: int) -> None:
        if self.complete(group):
            self.num_complete += 1
            if self.rules.drop_uninformative and self.waiting[group].uninformative:
                self._uninformative.add(group)

    def _drop(self, event: Dropped) -> None:
        admitted = self._end_wait(event.group)
        if self._curriculum is not None and admitted.prompt >= 0:
            self._curriculum.release(admitted.prompt)
        self.bytes -= self._held(admitted)
        self._in_flight -= self._expected(admitted) - len(admitted.samples)
        self._buffered -= len(admitted.samples)
        self._dropped[event.group] = event
        for sample in range(self.rules.group_size):
            if sample not in admitted.failed:
                self._drops[self._reason(event.group, sample)] += 1
        for sample, stored in admitted.samples.items():
            self.waste[self._reason(event.group, sample)] += stored.tokens
        if event.sample >= 0:
            self.waste[self._reason(event.group, event.sample)] += event.tokens
            self._late.add(Slot(event.group, event.sample))

    def _deliver(self, groups: tuple[int, ...]) -> None:
        for group in groups:
            self.delivered[group] = admitted = self._end_wait(group)
            # A pruned segment leaves a consumed group without its samples when the journal is folded again.
            pruned = self._expected(admitted) - len(admitted.samples)
            self._in_flight -= pruned
            self._buffered += pruned

    def _commit(self, step: int) -> None:
        self.bytes -= sum(self._held(admitted) for admitted in self.delivered.values())
        trained = sum(map(self._expected, self.delivered.values()))
        self._buffered -= trained
        self._consumed += trained
        self.delivered = {}
        self.step = step + 1

    def _end_wait(self, group: int) -> AdmittedGroup:
        self.num_complete -= self.complete(group)
        admitted = self.waiting.pop(group)
        self._uninformative.discard(group)
        self._due[admitted.expiry] -= 1
        if not self._due[admitted.expiry]:
            del self._due[admitted.expiry]
        return admitted

    # -- helpers -------------------------------------------------------------------------------------------------

    def _soon_ready(self) -> int:
        """Complete groups, and those admitted under this version or the one before; older ones are stragglers."""
        young = takewhile(lambda group: self.waiting[group].version >= self.version - 1, reversed(self.waiting))
        return self.num_complete + sum(not self.complete(group) for group in young)

    @property
    def lacks_fresh(self) -> bool:
        """Whether a group that was admitted now and complete at once would be taken: not all room is stragglers'."""
        return self._can_pass(self._due, self._latest_expiry + 1, 0)

    def _can_pass(self, due: Counter[int], expiry: int, chosen: int) -> bool:
        """Whether delivering a group of `expiry`, after `chosen` others, leaves (I) true."""
        waiting = 0
        for d in sorted(e for e in due if e < expiry):
            waiting += due[d]
            if waiting > self.capacity(d) - chosen - 1:
                return False
        return True

    def _held(self, admitted: AdmittedGroup) -> int:
        missing = self._expected(admitted) - len(admitted.samples)
        return sum(stored.bytes for stored in admitted.samples.values()) + missing * admitted.sample_bytes

    def _reason(self, group: int, sample: int) -> str:
        if (failed := self._failed.get(Slot(group, sample))) is not None:
            return failed.reason
        end = self._dropped[group]
        return str(end.reason if end.sample in (-1, sample) else DropReason.GROUP_INCOMPLETE)
