"""A run's timeline in the trace format that Perfetto and chrome://tracing read.

    run         i    publications, restarts, alarms and whatever else happened
                C    counters of each step
    trainer     X    trains, updates, waits for data or for the last publication, saves: one after the other
                X    publishes weights; evaluates
    rollout-N   b e  answers, which overlap
                X    moments in which answers were finished, with flows (s, f) to the pass that trained on them

Events come in the order of their time and are made while they are written. A viewer takes some hundred thousand of
them: of a longer run the newest part is shown, and `left_out` says so.
"""

from collections import defaultdict
from collections.abc import Iterator
from heapq import merge
from itertools import groupby
from typing import Any, NamedTuple

import duckdb

MAX_EVENTS = 200_000
PER_ANSWER, PER_STEP = 5, 6
"""Events that are made of an answer, and of a step's metrics."""
RUN, TRAINER, FIRST_ENGINE = 1, 2, 10
"""Numbers of processes."""
TRAINS, PUBLISHES, EVALUATES = 1, 2, 3
"""Threads of the trainer."""
THREAD_OF = {
    **dict.fromkeys(("train", "update", "wait_batch", "wait_sync", "checkpoint"), TRAINS),
    "publish": PUBLISHES,
    "evaluation": EVALUATES,
}
ANSWERS, FINISHED = 1, 2
"""Threads of an engine."""
EVERYWHERE = ("publish", "restart", "alarm", "step_skipped", "engine_lost", "drafter_lost")
"""Moments that are drawn across all rows."""
TOLD = ("prompt", "reward", "finish", "answer_tokens", "oldest_version", "newest_version", "fate", "step")
"""Of an answer, when it is clicked on."""
COUNTERS = ("running", "waiting", "buffered", "in_flight", "staleness_mean", "reward")
MOMENT_US = 100
"""How long a moment is drawn, if the next one leaves room."""
WINDOW_SQL = """
    WITH things AS (
        SELECT time, 1 AS events FROM events
        UNION ALL SELECT time, $step FROM metrics
        UNION ALL SELECT started, $answer FROM trajectories
    )
    SELECT (SELECT min(time) FROM things), min(time)
    FROM (SELECT time, sum(events) OVER (ORDER BY time DESC) AS total FROM things) WHERE total <= $most
"""
SPANS_SQL = """
    SELECT time, seconds, kind, step, version FROM events
    WHERE seconds IS NOT NULL AND time >= $first ORDER BY time
"""
MOMENTS_SQL = """
    SELECT time + coalesce(seconds, 0), kind, engine, version, text FROM events
    WHERE (seconds IS NULL OR kind NOT IN ('train', 'update', 'wait_batch', 'wait_sync', 'checkpoint', 'evaluation'))
        AND time >= $first ORDER BY 1
"""
COUNTERS_SQL = """
    SELECT time, running, waiting, buffered, in_flight, staleness_mean, reward FROM metrics
    WHERE time >= $first ORDER BY time
"""
TAKES_SQL = "SELECT step, max(take) + 1 FROM groups WHERE step IS NOT NULL GROUP BY step"
ANSWERS_SQL = """
    SELECT t.engine, group_id, t.sample, t.started, greatest(t.started, t.finished), g.take, t.prompt, t.reward,
        t.finish, t.answer_tokens, t.oldest_version, t.newest_version, t.fate, t.step
    FROM trajectories t LEFT JOIN groups g USING (group_id) WHERE t.started >= $first ORDER BY t.started
"""
Event = dict[str, Any]


class Span(NamedTuple):
    """Microseconds since the run's beginning, as all times below."""

    start: int
    end: int
    kind: str
    told: Event


class Answer(NamedTuple):
    engine: str
    id: str
    start: int
    end: int
    trained: int | None
    """The beginning of the pass that trained on it."""
    told: Event


class Trace:
    """Of the run behind a connection of `open_run`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, max_events: int = MAX_EVENTS) -> None:
        self._connection = connection
        ((begin, first),) = self._fetch(WINDOW_SQL, step=PER_STEP, answer=PER_ANSWER, most=max_events)
        self._begin, self._first = begin or 0.0, first or begin or 0.0
        self._spans = self._read_spans()
        self._answers = self._read_answers()
        engines = sorted({answer.engine for answer in self._answers})
        self._engines = {name: FIRST_ENGINE + number for number, name in enumerate(engines)}

    @property
    def left_out(self) -> str:
        """What is not shown, in a sentence; empty when all is."""
        before = self._first - self._begin
        return f"the first {before:.1f} s of the run are left out: viewers take no more events" if before > 0 else ""

    def events(self) -> Iterator[Event]:
        yield from _process(RUN, "run", {1: "events"})
        yield from _process(TRAINER, "trainer", {TRAINS: "trains", PUBLISHES: "publishes", EVALUATES: "evaluates"})
        for name, process in self._engines.items():
            yield from _process(process, name, {ANSWERS: "answers", FINISHED: "finished"})
        yield from _in_order(
            self._slices(), self._moments(), self._counters(), self._overlapping(), self._leaving(), self._arriving()
        )

    def _read_spans(self) -> dict[int, list[Span]]:
        """By thread. Machines' clocks differ: what is drawn in one row begins when the one before it has ended."""
        threads: dict[int, list[Span]] = defaultdict(list)
        for time, seconds, kind, step, version in self._fetch(SPANS_SQL, first=self._first):
            if kind in THREAD_OF:
                spans = threads[THREAD_OF[kind]]
                start = max(self._us(time), spans[-1].end if spans else 0)
                end = max(self._us(time + seconds), start + 1)
                spans.append(Span(start, end, kind, _known({"step": step, "version": version})))
        return threads

    def _read_answers(self) -> list[Answer]:
        """In the order of their beginning. A step that was begun again is the one that counts."""
        passes: dict[int, list[int]] = defaultdict(list)
        for span in self._spans[TRAINS]:
            if span.kind == "train":
                passes[span.told["step"]].append(span.start)
        last = {step: passes[step][-takes:] for step, takes in self._fetch(TAKES_SQL)}
        answers: list[Answer] = []
        for engine, group, sample, started, ended, take, *values in self._fetch(ANSWERS_SQL, first=self._first):
            told = _known({"group": group, "sample": sample} | dict(zip(TOLD, values, strict=True)))
            starts = last.get(told.get("step", -1), [])[take or 0 :]
            start, end = self._us(started), self._us(ended)
            answers.append(Answer(engine, f"{group}/{sample}", start, end, starts[0] if starts else None, told))
        return answers

    def _slices(self) -> Iterator[Event]:
        threads = (
            [_slice(TRAINER, thread, span.kind, span.start, span.end) | {"args": span.told} for span in spans]
            for thread, spans in self._spans.items()
        )
        return _in_order(*map(iter, threads))

    def _moments(self) -> Iterator[Event]:
        for time, kind, engine, version, text in self._fetch(MOMENTS_SQL, first=self._first):
            event: Event = {"ph": "i", "cat": kind, "name": f"version {version}" if kind == "publish" else kind}
            event |= {"pid": RUN, "tid": 1, "ts": self._us(time), "s": "g" if kind in EVERYWHERE else "p"}
            yield event | {"args": _known({"engine": engine, "version": version, "text": text})}

    def _counters(self) -> Iterator[Event]:
        for time, *values in self._fetch(COUNTERS_SQL, first=self._first):
            for name, value in _known(dict(zip(COUNTERS, values, strict=True))).items():
                yield {"ph": "C", "name": name, "pid": RUN, "tid": 0, "ts": self._us(time), "args": {name: value}}

    def _overlapping(self) -> Iterator[Event]:
        """All have one name: what has one name is drawn as one row, as deep as it overlaps."""

        def half(phase: str, answer: Answer, time: int) -> Event:
            event = {"ph": phase, "cat": "answer", "name": "answer", "id": answer.id, "ts": time}
            return event | {"pid": self._engines[answer.engine], "tid": ANSWERS}

        begun = (half("b", answer, answer.start) | {"args": answer.told} for answer in self._answers)
        ended = (half("e", answer, answer.end) for answer in sorted(self._answers, key=lambda answer: answer.end))
        return _in_order(begun, ended)

    def _flowing(self) -> list[Answer]:
        return [answer for answer in self._answers if answer.trained is not None and answer.trained >= answer.end]

    def _leaving(self) -> Iterator[Event]:
        """A flow leaves a slice, which answers as such are not: those that end in one moment leave one together."""
        for_engine: dict[str, list[Answer]] = {name: [] for name in self._engines}
        for answer in sorted(self._flowing(), key=lambda answer: answer.end):
            for_engine[answer.engine].append(answer)
        return _in_order(*(self._leaving_from(engine, answers) for engine, answers in for_engine.items()))

    def _leaving_from(self, engine: str, answers: list[Answer]) -> Iterator[Event]:
        process = self._engines[engine]
        moments = [(moment, list(ended)) for moment, ended in groupby(answers, lambda answer: answer.end)]
        following = [*(moment for moment, _ in moments[1:]), moments[-1][0] + MOMENT_US] if moments else []
        for (moment, ended), after in zip(moments, following, strict=True):
            end = min(after, moment + MOMENT_US)
            yield _slice(process, FINISHED, "finished", moment, end) | {"args": {"answers": len(ended)}}
            for answer in ended:
                yield _flow("s", answer, process, FINISHED, moment)

    def _arriving(self) -> Iterator[Event]:
        arrivals = sorted((answer.trained or 0, answer) for answer in self._flowing())
        for time, answer in arrivals:
            yield _flow("f", answer, TRAINER, TRAINS, time) | {"bp": "e"}

    def _us(self, time: float) -> int:
        return round(1e6 * (time - self._begin))

    def _fetch(self, sql: str, **parameters: float) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters or None).fetchall()


def _in_order(*sources: Iterator[Event]) -> Iterator[Event]:
    """By time; of one moment, as the sources are named."""
    return merge(*sources, key=lambda event: event["ts"])


def _process(number: int, name: str, threads: dict[int, str]) -> Iterator[Event]:
    def told(what: str, thread: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": number, "tid": thread, "ts": 0, "args": args}

    yield told("process_name", 0, name=name)
    yield told("process_sort_index", 0, sort_index=number)
    for thread, title in threads.items():
        yield told("thread_name", thread, name=title)
        yield told("thread_sort_index", thread, sort_index=thread)


def _slice(process: int, thread: int, kind: str, start: int, end: int) -> Event:
    return {"ph": "X", "cat": kind, "name": kind, "pid": process, "tid": thread, "ts": start, "dur": end - start}


def _flow(phase: str, answer: Answer, process: int, thread: int, time: int) -> Event:
    event = {"ph": phase, "cat": "trained", "name": "trained", "id": answer.id}
    return event | {"pid": process, "tid": thread, "ts": time}


def _known(values: Event) -> Event:
    return {name: value for name, value in values.items() if value is not None}
