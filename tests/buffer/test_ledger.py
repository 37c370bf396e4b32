"""The ledger alone: conservation, staleness and liveness under arbitrary orders of events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.buffer.journal import Admitted, Advanced, Committed, Delivered, Dropped, Limited, Stored
from asyncrl.buffer.ledger import Ledger, LedgerRules, Refusal
from asyncrl.types import Slot


def rules(**changes: float) -> LedgerRules:
    values = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "group_timeout_s": 10.0,
        "max_bytes": 1 << 30,
        "sample_bytes": 100,
    }
    return LedgerRules(**(values | changes))  # pyright: ignore[reportArgumentType]


def admit(ledger: Ledger, now: float = 0.0) -> int:
    event = ledger.admission(now)
    assert isinstance(event, Admitted), event
    ledger.apply(event)
    return event.group


def fill(ledger: Ledger, group: int, oldest: int | None = None) -> None:
    for sample in ledger.missing(group):
        ledger.apply(Stored(group, sample, 10, 5, ledger.waiting[group].version if oldest is None else oldest))


def take(ledger: Ledger, limit: int) -> tuple[int, ...]:
    groups = ledger.choice(limit).groups
    ledger.apply(Delivered(ledger.step, groups))
    return groups


def next_step(ledger: Ledger) -> None:
    ledger.apply(Committed(ledger.step))
    ledger.apply(Advanced(ledger.step))


def test_admission_fills_the_window_and_says_why_it_stops() -> None:
    ledger = Ledger(rules(max_staleness=2))
    assert [admit(ledger) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    refusal = ledger.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "staleness: 6 groups wait to be trained"


def test_synchronous_mode_admits_one_step_and_waits_for_its_publication() -> None:
    ledger = Ledger(rules(max_staleness=0))
    for group in (admit(ledger), admit(ledger)):
        fill(ledger, group)
    assert isinstance(ledger.admission(0.0), Refusal)
    assert take(ledger, 2) == (0, 1)
    ledger.apply(Committed(0))
    refusal = ledger.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert "version 1 is not published" in refusal.reason
    ledger.apply(Advanced(1))
    assert admit(ledger) == 2


def test_a_straggler_is_passed_until_its_last_step_and_then_holds_its_place() -> None:
    ledger = Ledger(rules(max_staleness=1))
    straggler, *others = [admit(ledger) for _ in range(4)]
    for group in others:
        fill(ledger, group)
    assert take(ledger, 2) == (1, 2)
    next_step(ledger)
    fill(ledger, admit(ledger))
    fill(ledger, admit(ledger))
    # Step 1 is the last one for groups 0 and 3: one place is theirs, the other is reserved for the straggler.
    choice = ledger.choice(2)
    assert choice.groups == (3,)
    assert choice.reserved
    assert take(ledger, 2) == (3,)
    assert ledger.choice(2).groups == ()
    fill(ledger, straggler)
    assert take(ledger, 2) == (straggler,)


def test_what_is_complete_or_just_begun_bounds_admission_and_stragglers_do_not() -> None:
    ledger = Ledger(rules(max_staleness=3))
    straggler, quick = admit(ledger), admit(ledger)
    fill(ledger, quick)
    refusal = ledger.admission(0.0, max_ready=2)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "freshness: 2 groups are complete or just begun, enough for the trainer"
    assert take(ledger, 2) == (quick,)
    fill(ledger, admit(ledger))
    assert take(ledger, 2) == (2,)
    next_step(ledger)
    assert admit(ledger) == 3  # the straggler is of the version before, and may be a short answer just begun
    assert isinstance(ledger.admission(0.0, max_ready=2), Refusal)
    fill(ledger, 3)
    assert take(ledger, 2) == (3,)
    fill(ledger, admit(ledger))
    assert take(ledger, 2) == (4,)
    next_step(ledger)
    assert [admit(ledger), admit(ledger)] == [5, 6]  # now it is the tail
    assert isinstance(ledger.admission(0.0, max_ready=2), Refusal)
    fill(ledger, straggler)
    assert take(ledger, 2) == (straggler,)


def test_a_straggler_that_times_out_gives_its_place_back() -> None:
    ledger = Ledger(rules(max_staleness=0))
    late, done = admit(ledger, now=0.0), admit(ledger, now=5.0)
    fill(ledger, done)
    assert take(ledger, 2) == (done,)
    assert [drop.group for drop in ledger.overdue(10.0)] == [late]
    ledger.apply(Dropped(late, "timeout"))
    assert ledger.counts().dropped == {"timeout": 2}
    fill(ledger, admit(ledger))
    assert take(ledger, 2) == (2,)


def test_a_failed_sample_ends_its_group_and_every_slot_has_its_reason() -> None:
    ledger = Ledger(rules(group_size=3))
    group = admit(ledger)
    ledger.apply(Stored(group, 0, 10, 7, 0))
    ledger.apply(Dropped(group, "reward_error", 1, 4))
    assert ledger.counts().dropped == {"reward_error": 1, "group_incomplete": 2}
    assert ledger.waste == {"group_incomplete": 7, "reward_error": 4}
    assert ledger.status(Slot(group, 2)) == "dropped"
    late = ledger.late(Slot(group, 2), 9)
    assert late is not None
    ledger.apply(late)
    assert ledger.late(Slot(group, 2), 9) is None
    assert ledger.waste == {"group_incomplete": 16, "reward_error": 4}
    assert ledger.bytes == 0


def test_a_lower_bound_admits_less_and_is_kept_by_the_groups_admitted_under_it() -> None:
    ledger = Ledger(rules(max_staleness=2))
    ledger.apply(Limited(1))
    straggler, *others = [admit(ledger) for _ in range(4)]
    assert isinstance(ledger.admission(0.0), Refusal)
    for group in others:
        fill(ledger, group)
    assert take(ledger, 2) == (1, 2)
    next_step(ledger)
    fill(ledger, admit(ledger))
    fill(ledger, admit(ledger))
    # Step 1 is the last one for group 0, although max_staleness alone would let it be passed once more.
    assert take(ledger, 2) == (3,)
    assert ledger.choice(2).groups == ()
    fill(ledger, straggler)
    assert take(ledger, 2) == (straggler,)


def test_a_bound_that_falls_counts_for_what_is_admitted_next_and_the_old_groups_are_trained_first() -> None:
    ledger = Ledger(rules(max_staleness=2))
    for _ in range(6):
        fill(ledger, admit(ledger))
    assert take(ledger, 2) == (0, 1)
    ledger.apply(Limited(0))
    next_step(ledger)
    for step in (1, 2):  # each would be admitted under 2; now the waiting groups have all the places
        assert isinstance(ledger.admission(0.0), Refusal)
        assert take(ledger, 2) == (2 * step, 2 * step + 1)
        next_step(ledger)
    assert [admit(ledger), admit(ledger)] == [6, 7]
    assert isinstance(ledger.admission(0.0), Refusal)


def test_a_version_that_is_not_published_uses_up_the_bound() -> None:
    ledger = Ledger(rules(max_staleness=1))
    for step in range(2):
        while isinstance(event := ledger.admission(0.0), Admitted):
            ledger.apply(event)
            fill(ledger, event.group)
        take(ledger, 2)
        ledger.apply(Committed(step))
    # Both steps were trained with version 0. Whatever it generates now would be two versions old.
    refusal = ledger.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert "version 2 is not published" in refusal.reason
    ledger.apply(Advanced(2))
    assert [admit(ledger) for _ in range(4)] == [4, 5, 6, 7]


def test_a_group_of_equal_rewards_is_uninformative_once_it_is_complete() -> None:
    ledger = Ledger(rules(group_size=3, drop_uninformative=True))
    same, other = admit(ledger), admit(ledger)
    for sample in range(3):
        assert ledger.uninformative() == []
        ledger.apply(Stored(same, sample, 10, 5, 0, reward=0.5))
        ledger.apply(Stored(other, sample, 10, 5, 0, reward=0.5 * (sample == 2)))
    assert ledger.uninformative() == [Dropped(same, "uninformative")]
    ledger.apply(Dropped(same, "uninformative"))
    assert ledger.uninformative() == []
    assert ledger.counts().dropped == {"uninformative": 3}
    assert ledger.waste == {"uninformative": 15}
    assert take(ledger, 2) == (other,)


def test_a_group_whose_turns_earned_different_rewards_has_something_to_teach() -> None:
    ledger = Ledger(rules(group_size=2, drop_uninformative=True))
    episodes, plain = admit(ledger), admit(ledger)
    for sample in range(2):
        ledger.apply(Stored(episodes, sample, 10, 5, 0, reward=0.5, uneven=sample == 1))
        ledger.apply(Stored(plain, sample, 10, 5, 0, reward=0.5))
    assert ledger.uninformative() == [Dropped(plain, "uninformative")]


def test_age_is_judged_by_the_real_tokens_at_delivery() -> None:
    ledger = Ledger(rules(max_staleness=1))
    fill(ledger, admit(ledger))
    fill(ledger, admit(ledger))
    take(ledger, 2)
    next_step(ledger)
    fill(ledger, admit(ledger), oldest=-1)  # a rollout that kept tokens of a version before its ticket
    fill(ledger, admit(ledger), oldest=0)
    assert ledger.choice(2).stale == (2,)
    assert ledger.choice(2).groups == (3,)


def test_memory_is_reserved_at_admission_and_settled_by_the_real_size() -> None:
    ledger = Ledger(rules(max_bytes=450, max_staleness=9))
    first, _ = admit(ledger), admit(ledger)
    refusal = ledger.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "memory: 400 of 450 bytes are held or reserved, a group needs 200"
    fill(ledger, first)
    assert ledger.bytes == 220
    assert admit(ledger) == 2
    ledger.apply(Stored(1, 0, 170, 5, 0))
    refusal = ledger.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.lacking == 340  # the largest sample seen is the new guess


def test_a_slot_that_was_never_leased_is_an_error() -> None:
    ledger = Ledger(rules())
    admit(ledger)
    for slot in (Slot(1, 0), Slot(0, 2), Slot(-1, 0)):
        with pytest.raises(ValueError, match="no ticket was issued"):
            ledger.status(slot)


class BookMachine(RuleBasedStateMachine):
    """Any order of events that the decisions allow."""

    @initialize(size=st.integers(1, 3), quota=st.integers(1, 4), staleness=st.integers(0, 3))
    def begin(self, size: int, quota: int, staleness: int) -> None:
        self.ledger = Ledger(rules(group_size=size, groups_per_step=quota, max_staleness=staleness, max_bytes=20_000))
        self.now = 0.0
        self.ended: set[int] = set()

    @rule()
    def admit(self) -> None:
        event = self.ledger.admission(self.now)
        if isinstance(event, Admitted):
            self.ledger.apply(event)

    @rule(data=st.data(), size=st.integers(1, 300), young=st.booleans())
    def store(self, data: st.DataObject, size: int, young: bool) -> None:
        slots = [(g, s) for g in self.ledger.waiting for s in self.ledger.missing(g)]
        if slots:
            group, sample = data.draw(st.sampled_from(slots))
            oldest = self.ledger.version if young else self.ledger.waiting[group].version
            assert self.ledger.status(Slot(group, sample)) == "stored"
            self.ledger.apply(Stored(group, sample, size, 3, oldest))
            expected = "duplicate"
            assert self.ledger.status(Slot(group, sample)) == expected

    @rule(data=st.data())
    def complete_one(self, data: st.DataObject) -> None:
        if self.ledger.waiting:
            fill(self.ledger, data.draw(st.sampled_from(sorted(self.ledger.waiting))))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slots = [(g, s) for g in self.ledger.waiting for s in self.ledger.missing(g)]
        if slots:
            group, sample = data.draw(st.sampled_from(slots))
            self.ledger.apply(Dropped(group, "reward_error", sample, 1))
            self.end(group)

    @rule(seconds=st.floats(0.1, 6.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for drop in self.ledger.overdue(self.now):
            self.ledger.apply(drop)
            self.end(drop.group)

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        choice = self.ledger.choice(limit)
        assert not choice.stale, "no token was older than its ticket"
        assert len(choice.groups) <= limit
        for group in choice.groups:
            lease = self.ledger.waiting[group]
            assert len(lease.samples) == self.ledger.rules.group_size
            assert self.ledger.step - min(s.oldest for s in lease.samples.values()) <= self.ledger.rules.max_staleness
            self.end(group)
        self.ledger.apply(Delivered(self.ledger.step, choice.groups))

    @precondition(lambda self: not self.ledger.capacity(self.ledger.step))
    @rule(publish=st.booleans())
    def commit(self, publish: bool) -> None:
        self.ledger.apply(Committed(self.ledger.step))
        if publish:
            self.ledger.apply(Advanced(self.ledger.step))

    @rule()
    def publish(self) -> None:
        self.ledger.apply(Advanced(self.ledger.step))

    @rule(bound=st.integers(0, 3))
    def limit(self, bound: int) -> None:
        self.ledger.apply(Limited(min(bound, self.ledger.rules.max_staleness)))

    def end(self, group: int) -> None:
        assert group not in self.ended, "a group ends once"
        self.ended.add(group)

    @invariant()
    def adds_up(self) -> None:
        ledger = self.ledger
        counts = ledger.counts()
        assert counts.balanced
        held = list(ledger.waiting.values()) + list(ledger.delivered.values())
        size = ledger.rules.group_size
        assert counts.in_flight == sum(size - len(lease.samples) for lease in held)
        assert counts.buffered == sum(len(lease.samples) for lease in held)
        assert counts.consumed == size * (ledger.step * ledger.rules.groups_per_step)
        stored = sum(s.bytes for lease in held for s in lease.samples.values())
        assert ledger.bytes == stored + sum((size - len(lease.samples)) * lease.sample_bytes for lease in held)
        assert ledger.num_complete == sum(map(ledger.complete, ledger.waiting))

    @invariant()
    def everyone_can_be_trained_in_time(self) -> None:
        assert self.ledger.feasible


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    quota=st.integers(1, 5),
    staleness=st.integers(0, 3),
    publish_lag=st.integers(0, 2),
    failure=st.sampled_from([0.0, 0.2]),
    windows=st.lists(st.integers(0, 12), min_size=15, max_size=15),
)
def test_training_proceeds_whatever_finishes_first(
    seed: int, quota: int, staleness: int, publish_lag: int, failure: float, windows: list[int]
) -> None:
    """If each group completes, fails or times out, 15 steps are trained within a bounded number of turns, however many
    groups are kept ready in each."""
    rng = random.Random(seed)
    ledger = Ledger(rules(groups_per_step=quota, max_staleness=staleness))
    order: list[int] = []
    unpublished = 0
    for now in range(15 * (quota + publish_lag + 2) * 20):
        while isinstance(event := ledger.admission(float(now), windows[ledger.step]), Admitted):
            ledger.apply(event)
        for drop in ledger.overdue(float(now)):
            ledger.apply(drop)
        running = [group for group in ledger.waiting if not ledger.complete(group)]
        if running:
            group = rng.choice(running)
            if rng.random() < failure:
                ledger.apply(Dropped(group, "engine_error", ledger.missing(group)[0]))
            else:
                fill(ledger, group)
        for group in ledger.choice(rng.randint(1, quota)).groups:
            assert ledger.step - ledger.waiting[group].version <= staleness
            order.append(group)
            ledger.apply(Delivered(ledger.step, (group,)))
        if not ledger.capacity(ledger.step):
            ledger.apply(Committed(ledger.step))
            unpublished = publish_lag
        elif unpublished:
            unpublished -= 1
        if not unpublished:
            ledger.apply(Advanced(ledger.step))
        if ledger.step == 15:
            break
    assert ledger.step == 15
    assert len(set(order)) == len(order) == 15 * quota


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    quota=st.integers(1, 4),
    staleness=st.integers(0, 4),
    bounds=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=20, max_size=20),
)
def test_training_proceeds_under_any_bounds_and_cadence_that_a_controller_may_choose(
    seed: int, quota: int, staleness: int, bounds: list[tuple[int, int]]
) -> None:
    """After each step another bound k and cadence c <= max(1, k): 20 steps are trained, none on too old a group."""
    rng = random.Random(seed)
    ledger = Ledger(rules(groups_per_step=quota, max_staleness=staleness))
    for step, (wanted, rarely) in enumerate(bounds):
        while ledger.capacity(step):
            while isinstance(event := ledger.admission(0.0), Admitted):
                ledger.apply(event)
            running = [group for group in ledger.waiting if not ledger.complete(group)]
            if running:
                fill(ledger, rng.choice(running))
            choice = ledger.choice(rng.randint(1, quota))
            assert running or choice.groups, "nothing runs and nothing can be taken"
            for group in choice.groups:
                assert step - ledger.waiting[group].version <= staleness
            ledger.apply(Delivered(step, choice.groups))
        ledger.apply(Committed(step))
        bound = min(wanted, staleness)
        ledger.apply(Limited(bound))
        if step + 1 - ledger.version >= min(rarely, max(1, bound)):
            ledger.apply(Advanced(step + 1))
        assert ledger.feasible


def test_groups_are_overtaken_in_practice() -> None:
    """With room in the window the first finished are trained first: the oldest does not block the step."""
    ledger = Ledger(rules(groups_per_step=4, max_staleness=3))
    groups = [admit(ledger) for _ in range(16)]
    for group in groups[12:]:
        fill(ledger, group)
    assert take(ledger, 4) == (12, 13, 14, 15)


def test_nothing_is_admitted_that_the_last_step_cannot_take():
    ledger = Ledger(rules(max_staleness=3, total_steps=2))
    groups = [admit(ledger) for _ in range(4)]
    assert isinstance(ledger.admission(0.0), Refusal)
    for group in groups:
        fill(ledger, group)
    for step in range(2):
        assert take(ledger, 2) == (2 * step, 2 * step + 1)
        ledger.apply(Committed(step))
        ledger.apply(Advanced(step + 1))
        assert isinstance(ledger.admission(0.0), Refusal)
    assert ledger.counts().consumed == ledger.counts().leased == 8


def test_a_dropped_group_of_the_last_step_is_replaced():
    ledger = Ledger(rules(max_staleness=0, total_steps=1))
    admit(ledger)
    ledger.apply(Dropped(admit(ledger), "timeout"))
    assert admit(ledger) == 2
