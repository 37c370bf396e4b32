"""The in-flight limit of one engine, against a model of an engine with a knee."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.fleet import Concurrency
from asyncrl.fleet.concurrency import InFlightLimit, Pressure

SETTINGS = Concurrency(adaptive=True, min=4, start=16, raise_by=4)


def test_it_grows_while_it_is_used_up_and_pays() -> None:
    limit = InFlightLimit(SETTINGS)
    tokens = [0, 100, 300, 600]
    assert [limit.observe(float(at), 100, Pressure(16, 0, total)) for at, total in enumerate(tokens)] == [
        16,
        20,
        24,
        28,
    ]
    assert limit.observe(4.0, 10, Pressure(10, 0, 1000)) == 28, "nobody uses it"


def test_a_raise_that_brought_nothing_is_taken_back() -> None:
    limit = InFlightLimit(SETTINGS)
    rates = [0, 100, 101, 101, 101, 150]
    seen = [limit.observe(float(at), 100, Pressure(16, 0, sum(rates[: at + 1]))) for at in range(len(rates))]
    assert seen == [16, 20, 16, 16, 16, 20]


def test_a_queue_that_stays_or_a_preemption_cuts_it() -> None:
    limit = InFlightLimit(SETTINGS)
    limit.observe(0.0, 16, Pressure(12, 0, 0))
    assert limit.observe(1.0, 8, Pressure(12, 4, 100)) == 16, "they may have come in this very moment"
    assert limit.observe(2.0, 16, Pressure(12, 4, 200)) == 12
    assert limit.observe(3.0, 12, Pressure(12, 0, 300, preempted=1)) == 9
    assert limit.observe(4.0, 9, Pressure(9, 0, 400, preempted=1)) == 13, "and it grows again from there"


def test_an_engine_that_was_started_again_begins_with_its_limit() -> None:
    limit = InFlightLimit(SETTINGS)
    limit.observe(0.0, 16, Pressure(16, 0, 5000, preempted=7))
    assert limit.observe(1.0, 16, Pressure(16, 0, 10)) == 16
    assert limit.observe(2.0, 16, Pressure(16, 0, 500)) == 20


@given(st.integers(4, 400), st.integers(4, 400))
def test_it_comes_to_rest_between_half_the_knee_and_what_the_engine_can_run(knee: int, rows: int) -> None:
    """Tokens per second grow with the batch up to `knee`; `rows` run, the rest of what is given waits."""
    limit, tokens = InFlightLimit(SETTINGS), 0.0
    for second in range(400):
        running = min(limit.limit, rows)
        tokens += 50 * min(running, knee)
        limit.observe(float(second), limit.limit, Pressure(running, limit.limit - running, int(tokens)))
    useful = min(knee, rows)
    assert SETTINGS.min <= limit.limit
    assert limit.limit >= min(useful, SETTINGS.start) * SETTINGS.lower_to - SETTINGS.raise_by
    assert limit.limit <= max(min(rows, max(knee, SETTINGS.start)) + 3 * SETTINGS.raise_by, SETTINGS.min)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50), st.integers(0, 9000), st.integers(0, 2))))
def test_never_below_the_least(looks: list[tuple[int, int, int, int]]) -> None:
    limit, tokens, preempted = InFlightLimit(SETTINGS), 0, 0
    for second, (held, waiting, more, lost) in enumerate(looks):
        tokens, preempted = tokens + more, preempted + lost
        before = limit.limit
        after = limit.observe(float(second), held, Pressure(held, waiting, tokens, preempted))
        assert SETTINGS.min <= after <= before + SETTINGS.raise_by
