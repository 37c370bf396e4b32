"""The book alone: conservation, staleness and liveness under arbitrary orders of events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.buffer.journal import Admitted, Advanced, Committed, Delivered, Dropped, Limited, Stored
from asyncrl.buffer.ledger import Book, Refusal, Terms
from asyncrl.types import Slot


def terms(**changes: float) -> Terms:
    values = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "group_timeout_s": 10.0,
        "max_bytes": 1 << 30,
        "sample_bytes": 100,
    }
    return Terms(**(values | changes))  # pyright: ignore[reportArgumentType]


def admit(book: Book, now: float = 0.0) -> int:
    event = book.admission(now)
    assert isinstance(event, Admitted), event
    book.apply(event)
    return event.group


def fill(book: Book, group: int, oldest: int | None = None) -> None:
    for sample in book.missing(group):
        book.apply(Stored(group, sample, 10, 5, book.waiting[group].version if oldest is None else oldest))


def take(book: Book, limit: int) -> tuple[int, ...]:
    groups = book.choice(limit).groups
    book.apply(Delivered(book.step, groups))
    return groups


def next_step(book: Book) -> None:
    book.apply(Committed(book.step))
    book.apply(Advanced(book.step))


def test_admission_fills_the_window_and_says_why_it_stops() -> None:
    book = Book(terms(max_staleness=2))
    assert [admit(book) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "staleness: 6 groups wait to be trained"


def test_synchronous_mode_admits_one_step_and_waits_for_its_publication() -> None:
    book = Book(terms(max_staleness=0))
    for group in (admit(book), admit(book)):
        fill(book, group)
    assert isinstance(book.admission(0.0), Refusal)
    assert take(book, 2) == (0, 1)
    book.apply(Committed(0))
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert "version 1 is not published" in refusal.reason
    book.apply(Advanced(1))
    assert admit(book) == 2


def test_a_straggler_is_passed_until_its_last_step_and_then_holds_its_place() -> None:
    book = Book(terms(max_staleness=1))
    straggler, *others = [admit(book) for _ in range(4)]
    for group in others:
        fill(book, group)
    assert take(book, 2) == (1, 2)
    next_step(book)
    fill(book, admit(book))
    fill(book, admit(book))
    # Step 1 is the last one for groups 0 and 3: one place is theirs, the other is reserved for the straggler.
    choice = book.choice(2)
    assert choice.groups == (3,)
    assert choice.reserved
    assert take(book, 2) == (3,)
    assert book.choice(2).groups == ()
    fill(book, straggler)
    assert take(book, 2) == (straggler,)


def test_what_is_complete_or_just_begun_bounds_admission_and_stragglers_do_not() -> None:
    book = Book(terms(max_staleness=3, max_ready=2))
    straggler, quick = admit(book), admit(book)
    fill(book, quick)
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "freshness: 2 groups are complete or just begun, flow.max_ready_groups as well"
    assert take(book, 2) == (quick,)
    fill(book, admit(book))
    assert take(book, 2) == (2,)
    next_step(book)
    assert admit(book) == 3  # the straggler is of the version before, and may be a short answer just begun
    assert isinstance(book.admission(0.0), Refusal)
    fill(book, 3)
    assert take(book, 2) == (3,)
    fill(book, admit(book))
    assert take(book, 2) == (4,)
    next_step(book)
    assert [admit(book), admit(book)] == [5, 6]  # now it is the tail
    assert isinstance(book.admission(0.0), Refusal)
    fill(book, straggler)
    assert take(book, 2) == (straggler,)


def test_a_straggler_that_times_out_gives_its_place_back() -> None:
    book = Book(terms(max_staleness=0))
    late, done = admit(book, now=0.0), admit(book, now=5.0)
    fill(book, done)
    assert take(book, 2) == (done,)
    assert [drop.group for drop in book.overdue(10.0)] == [late]
    book.apply(Dropped(late, "timeout"))
    assert book.counts().dropped == {"timeout": 2}
    fill(book, admit(book))
    assert take(book, 2) == (2,)


def test_a_failed_sample_ends_its_group_and_every_slot_has_its_reason() -> None:
    book = Book(terms(group_size=3))
    group = admit(book)
    book.apply(Stored(group, 0, 10, 7, 0))
    book.apply(Dropped(group, "reward_error", 1, 4))
    assert book.counts().dropped == {"reward_error": 1, "group_incomplete": 2}
    assert book.waste == {"group_incomplete": 7, "reward_error": 4}
    assert book.status(Slot(group, 2)) == "dropped"
    late = book.late(Slot(group, 2), 9)
    assert late is not None
    book.apply(late)
    assert book.late(Slot(group, 2), 9) is None
    assert book.waste == {"group_incomplete": 16, "reward_error": 4}
    assert book.bytes == 0


def test_a_lower_bound_admits_less_and_is_kept_by_the_groups_admitted_under_it() -> None:
    book = Book(terms(max_staleness=2))
    book.apply(Limited(1))
    straggler, *others = [admit(book) for _ in range(4)]
    assert isinstance(book.admission(0.0), Refusal)
    for group in others:
        fill(book, group)
    assert take(book, 2) == (1, 2)
    next_step(book)
    fill(book, admit(book))
    fill(book, admit(book))
    # Step 1 is the last one for group 0, although max_staleness alone would let it be passed once more.
    assert take(book, 2) == (3,)
    assert book.choice(2).groups == ()
    fill(book, straggler)
    assert take(book, 2) == (straggler,)


def test_a_bound_that_falls_counts_for_what_is_admitted_next_and_the_old_groups_are_trained_first() -> None:
    book = Book(terms(max_staleness=2))
    for _ in range(6):
        fill(book, admit(book))
    assert take(book, 2) == (0, 1)
    book.apply(Limited(0))
    next_step(book)
    for step in (1, 2):  # each would be admitted under 2; now the waiting groups have all the places
        assert isinstance(book.admission(0.0), Refusal)
        assert take(book, 2) == (2 * step, 2 * step + 1)
        next_step(book)
    assert [admit(book), admit(book)] == [6, 7]
    assert isinstance(book.admission(0.0), Refusal)


def test_a_version_that_is_not_published_uses_up_the_bound() -> None:
    book = Book(terms(max_staleness=1))
    for step in range(2):
        while isinstance(event := book.admission(0.0), Admitted):
            book.apply(event)
            fill(book, event.group)
        take(book, 2)
        book.apply(Committed(step))
    # Both steps were trained with version 0. Whatever it generates now would be two versions old.
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert "version 2 is not published" in refusal.reason
    book.apply(Advanced(2))
    assert [admit(book) for _ in range(4)] == [4, 5, 6, 7]


def test_a_group_of_equal_rewards_is_uninformative_once_it_is_complete() -> None:
    book = Book(terms(group_size=3, drop_uninformative=True))
    same, other = admit(book), admit(book)
    for sample in range(3):
        assert book.uninformative() == []
        book.apply(Stored(same, sample, 10, 5, 0, reward=0.5))
        book.apply(Stored(other, sample, 10, 5, 0, reward=0.5 * (sample == 2)))
    assert book.uninformative() == [Dropped(same, "uninformative")]
    book.apply(Dropped(same, "uninformative"))
    assert book.uninformative() == []
    assert book.counts().dropped == {"uninformative": 3}
    assert book.waste == {"uninformative": 15}
    assert take(book, 2) == (other,)


def test_age_is_judged_by_the_real_tokens_at_delivery() -> None:
    book = Book(terms(max_staleness=1))
    fill(book, admit(book))
    fill(book, admit(book))
    take(book, 2)
    next_step(book)
    fill(book, admit(book), oldest=-1)  # a rollout that kept tokens of a version before its ticket
    fill(book, admit(book), oldest=0)
    assert book.choice(2).stale == (2,)
    assert book.choice(2).groups == (3,)


def test_memory_is_promised_at_admission_and_settled_by_the_real_size() -> None:
    book = Book(terms(max_bytes=450, max_staleness=9))
    first, _ = admit(book), admit(book)
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "memory: 400 of 450 bytes are held or promised, a group needs 200"
    fill(book, first)
    assert book.bytes == 220
    assert admit(book) == 2
    book.apply(Stored(1, 0, 170, 5, 0))
    refusal = book.admission(0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.lacking == 340  # the largest sample seen is the new guess


def test_a_slot_that_was_never_leased_is_an_error() -> None:
    book = Book(terms())
    admit(book)
    for slot in (Slot(1, 0), Slot(0, 2), Slot(-1, 0)):
        with pytest.raises(ValueError, match="never leased"):
            book.status(slot)


class BookMachine(RuleBasedStateMachine):
    """Any order of events that the decisions allow."""

    @initialize(size=st.integers(1, 3), quota=st.integers(1, 4), staleness=st.integers(0, 3))
    def begin(self, size: int, quota: int, staleness: int) -> None:
        self.book = Book(terms(group_size=size, groups_per_step=quota, max_staleness=staleness, max_bytes=20_000))
        self.now = 0.0
        self.ended: set[int] = set()

    @rule()
    def admit(self) -> None:
        event = self.book.admission(self.now)
        if isinstance(event, Admitted):
            self.book.apply(event)

    @rule(data=st.data(), size=st.integers(1, 300), young=st.booleans())
    def store(self, data: st.DataObject, size: int, young: bool) -> None:
        slots = [(g, s) for g in self.book.waiting for s in self.book.missing(g)]
        if slots:
            group, sample = data.draw(st.sampled_from(slots))
            oldest = self.book.version if young else self.book.waiting[group].version
            assert self.book.status(Slot(group, sample)) == "stored"
            self.book.apply(Stored(group, sample, size, 3, oldest))
            expected = "duplicate"
            assert self.book.status(Slot(group, sample)) == expected

    @rule(data=st.data())
    def complete_one(self, data: st.DataObject) -> None:
        if self.book.waiting:
            fill(self.book, data.draw(st.sampled_from(sorted(self.book.waiting))))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slots = [(g, s) for g in self.book.waiting for s in self.book.missing(g)]
        if slots:
            group, sample = data.draw(st.sampled_from(slots))
            self.book.apply(Dropped(group, "reward_error", sample, 1))
            self.end(group)

    @rule(seconds=st.floats(0.1, 6.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for drop in self.book.overdue(self.now):
            self.book.apply(drop)
            self.end(drop.group)

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        choice = self.book.choice(limit)
        assert not choice.stale, "no token was older than its ticket"
        assert len(choice.groups) <= limit
        for group in choice.groups:
            lease = self.book.waiting[group]
            assert len(lease.samples) == self.book.terms.group_size
            assert self.book.step - min(s.oldest for s in lease.samples.values()) <= self.book.terms.max_staleness
            self.end(group)
        self.book.apply(Delivered(self.book.step, choice.groups))

    @precondition(lambda self: not self.book.places(self.book.step))
    @rule(publish=st.booleans())
    def commit(self, publish: bool) -> None:
        self.book.apply(Committed(self.book.step))
        if publish:
            self.book.apply(Advanced(self.book.step))

    @rule()
    def publish(self) -> None:
        self.book.apply(Advanced(self.book.step))

    @rule(bound=st.integers(0, 3))
    def limit(self, bound: int) -> None:
        self.book.apply(Limited(min(bound, self.book.terms.max_staleness)))

    def end(self, group: int) -> None:
        assert group not in self.ended, "a group ends once"
        self.ended.add(group)

    @invariant()
    def adds_up(self) -> None:
        book = self.book
        counts = book.counts()
        assert counts.balanced
        held = list(book.waiting.values()) + list(book.delivered.values())
        size = book.terms.group_size
        assert counts.in_flight == sum(size - len(lease.samples) for lease in held)
        assert counts.buffered == sum(len(lease.samples) for lease in held)
        assert counts.consumed == size * (book.step * book.terms.groups_per_step)
        stored = sum(s.bytes for lease in held for s in lease.samples.values())
        assert book.bytes == stored + sum((size - len(lease.samples)) * lease.sample_bytes for lease in held)
        assert book.num_complete == sum(map(book.complete, book.waiting))

    @invariant()
    def everyone_can_be_trained_in_time(self) -> None:
        assert self.book.feasible


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    quota=st.integers(1, 5),
    staleness=st.integers(0, 3),
    publish_lag=st.integers(0, 2),
    failure=st.sampled_from([0.0, 0.2]),
    ready_steps=st.sampled_from([0, 1, 2]),
)
def test_training_proceeds_whatever_finishes_first(
    seed: int, quota: int, staleness: int, publish_lag: int, failure: float, ready_steps: int
) -> None:
    """If each group completes, fails or times out, 15 steps are trained within a bounded number of turns."""
    rng = random.Random(seed)
    book = Book(terms(groups_per_step=quota, max_staleness=staleness, max_ready=ready_steps * quota))
    order: list[int] = []
    unpublished = 0
    for now in range(15 * (quota + publish_lag + 2) * 20):
        while isinstance(event := book.admission(float(now)), Admitted):
            book.apply(event)
        for drop in book.overdue(float(now)):
            book.apply(drop)
        running = [group for group in book.waiting if not book.complete(group)]
        if running:
            group = rng.choice(running)
            if rng.random() < failure:
                book.apply(Dropped(group, "engine_error", book.missing(group)[0]))
            else:
                fill(book, group)
        for group in book.choice(rng.randint(1, quota)).groups:
            assert book.step - book.waiting[group].version <= staleness
            order.append(group)
            book.apply(Delivered(book.step, (group,)))
        if not book.places(book.step):
            book.apply(Committed(book.step))
            unpublished = publish_lag
        elif unpublished:
            unpublished -= 1
        if not unpublished:
            book.apply(Advanced(book.step))
        if book.step == 15:
            break
    assert book.step == 15
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
    book = Book(terms(groups_per_step=quota, max_staleness=staleness))
    for step, (wanted, rarely) in enumerate(bounds):
        while book.places(step):
            while isinstance(event := book.admission(0.0), Admitted):
                book.apply(event)
            running = [group for group in book.waiting if not book.complete(group)]
            if running:
                fill(book, rng.choice(running))
            choice = book.choice(rng.randint(1, quota))
            assert running or choice.groups, "nothing runs and nothing can be taken"
            for group in choice.groups:
                assert step - book.waiting[group].version <= staleness
            book.apply(Delivered(step, choice.groups))
        book.apply(Committed(step))
        bound = min(wanted, staleness)
        book.apply(Limited(bound))
        if step + 1 - book.version >= min(rarely, max(1, bound)):
            book.apply(Advanced(step + 1))
        assert book.feasible


def test_groups_are_overtaken_in_practice() -> None:
    """With room in the window the first finished are trained first: the oldest does not block the step."""
    book = Book(terms(groups_per_step=4, max_staleness=3))
    groups = [admit(book) for _ in range(16)]
    for group in groups[12:]:
        fill(book, group)
    assert take(book, 4) == (12, 13, 14, 15)


def test_nothing_is_admitted_that_the_last_step_cannot_take():
    book = Book(terms(max_staleness=3, total_steps=2))
    groups = [admit(book) for _ in range(4)]
    assert isinstance(book.admission(0.0), Refusal)
    for group in groups:
        fill(book, group)
    for step in range(2):
        assert take(book, 2) == (2 * step, 2 * step + 1)
        book.apply(Committed(step))
        book.apply(Advanced(step + 1))
        assert isinstance(book.admission(0.0), Refusal)
    assert book.counts().consumed == book.counts().leased == 8


def test_a_dropped_group_of_the_last_step_is_replaced():
    book = Book(terms(max_staleness=0, total_steps=1))
    admit(book)
    book.apply(Dropped(admit(book), "timeout"))
    assert admit(book) == 2
