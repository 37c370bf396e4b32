"""A run's timeline in the trace format that Perfetto and chrome://tracing read.

    run         i    publications, restarts, alarms and whatever else happened
                C    counters of each step
    trainer     X    trains, updates, waits for data or for the last publication, saves: one after the other
                X    publishes weights; evaluates
    rollout-N   b e  completions, which overlap
                X    moments in which completions were finished, with flows (s, f) to the pass that trained on them

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
PER_COMPLETION, PER_STEP = 5, 6
"""Events that are made of a completion, and of a step's metrics."""
RUN, TRAINER, FIRST_ENGINE = 1, 2, 10
"""Numbers of processes."""
TRAINS, PUBLISHES, EVALUATES, WRITES = 1, 2, 3, 4
"""Threads of the trainer."""
THREAD_OF = {
    **dict.fromkeys(("train", "update", "wait_batch", "wait_sync", "checkpoint"), TRAINS),
    "publish": PUBLISHES,
    "evaluation": EVALUATES,
    "checkpoint_written": WRITES,
}
COMPLETIONS, FINISHED = 1, 2
"""Threads of an engine."""
EVERYWHERE = ("publish", "restart", "alarm", "step_skipped", "engine_lost", "drafter_lost", "drafter_failed")
"""Moments that are drawn across all rows."""
TOLD = ("prompt", "reward", "finish", "answer_tokens", "oldest_version", "newest_version", "fate", "step")
"""Of a completion, when it is clicked on."""
COUNTERS = ("running", "waiting", "buffered", "in_flight", "staleness_mean", "reward")
MOMENT_US = 100
"""How long a moment is drawn, if the next one leaves room."""
WINDOW_SQL = """
    WITH things AS (
        SELECT time, 1 AS events FROM events
        UNION ALL SELECT time, $step FROM metrics
        UNION ALL SELECT started, $completion FROM trajectories
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
    WHERE (seconds IS NULL OR kind NOT IN
            ('train', 'update', 'wait_batch', 'wait_sync', 'checkpoint', 'checkpoint_written', 'evaluation'))
        AND time >= $first ORDER BY 1
"""
COUNTERS_SQL = """
    SELECT time, running, waiting, buffered, in_flight, staleness_mean, reward FROM metrics
    WHERE time >= $first ORDER BY time
"""
TAKES_SQL = "SELECT step, max(take) + 1 FROM groups WHERE step IS NOT NULL GROUP BY step"
COMPLETIONS_SQL = """
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


class Completion(NamedTuple):
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
        ((begin, first),) = self._fetch(WINDOW_SQL, step=PER_STEP, completion=PER_COMPLETION, most=max_events)
        self._begin, self._first = begin or 0.0, first or begin or 0.0
        self._spans = self._read_spans()
        self._completions = self._read_completions()
        engines = sorted({completion.engine for completion in self._completions})
        self._engines = {name: FIRST_ENGINE + number for number, name in enumerate(engines)}

    @property
    def left_out(self) -> str:
        """What is not shown, in a sentence; empty when all is."""
        before = self._first - self._begin
        return f"the first {before:.1f} s of the run are left out: viewers take no more events" if before > 0 else ""

    def events(self) -> Iterator[Event]:
        yield from _process(RUN, "run", {1: "events"})
        threads = {TRAINS: "trains", PUBLISHES: "publishes", EVALUATES: "evaluates", WRITES: "writes checkpoints"}
        yield from _process(TRAINER, "trainer", threads)
        for name, process in self._engines.items():
            yield from _process(process, name, {COMPLETIONS: "completions", FINISHED: "finished"})
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

    def _read_completions(self) -> list[Completion]:
        """In the order of their beginning. A step that was begun again is the one that counts."""
        passes: dict[int, list[int]] = defaultdict(list)
        for span in self._spans[TRAINS]:
            if span.kind == "train":
                passes[span.told["step"]].append(span.start)
        last = {step: passes[step][-takes:] for step, takes in self._fetch(TAKES_SQL)}
        completions: list[Completion] = []
        for engine, group, sample, started, ended, take, *values in self._fetch(COMPLETIONS_SQL, first=self._first):
            told = _known({"group": group, "sample": sample} | dict(zip(TOLD, values, strict=True)))
            starts = last.get(told.get("step", -1), [])[take or 0 :]
            start, end = self._us(started), self._us(ended)
            completions.append(Completion(engine, f"{group}/{sample}", start, end, starts[0] if starts else None, told))
        return completions

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

        def half(phase: str, completion: Completion, time: int) -> Event:
            event = {"ph": phase, "cat": "completion", "name": "completion", "id": completion.id, "ts": time}
            return event | {"pid": self._engines[completion.engine], "tid": COMPLETIONS}

        begun = (half("b", each, each.start) | {"args": each.told} for each in self._completions)
        ended = (half("e", each, each.end) for each in sorted(self._completions, key=lambda each: each.end))
        return _in_order(begun, ended)

    def _flowing(self) -> list[Completion]:
        return [each for each in self._completions if each.trained is not None and each.trained >= each.end]

    def _leaving(self) -> Iterator[Event]:
        """A flow leaves a slice, which completions as such are not: those that end in one moment leave one together."""
        for_engine: dict[str, list[Completion]] = {name: [] for name in self._engines}
        for completion in sorted(self._flowing(), key=lambda completion: completion.end):
            for_engine[completion.engine].append(completion)
        return _in_order(*(self._leaving_from(engine, completions) for engine, completions in for_engine.items()))

    def _leaving_from(self, engine: str, completions: list[Completion]) -> Iterator[Event]:
        process = self._engines[engine]
        moments = [(moment, list(ended)) for moment, ended in groupby(completions, lambda completion: completion.end)]
        following = [*(moment for moment, _ in moments[1:]), moments[-1][0] + MOMENT_US] if moments else []
        for (moment, ended), after in zip(moments, following, strict=True):
            end = min(after, moment + MOMENT_US)
            yield _slice(process, FINISHED, "finished", moment, end) | {"args": {"completions": len(ended)}}
            for completion in ended:
                yield _flow("s", completion, process, FINISHED, moment)

    def _arriving(self) -> Iterator[Event]:
        arrivals = sorted((completion.trained or 0, completion) for completion in self._flowing())
        for time, completion in arrivals:
            yield _flow("f", completion, TRAINER, TRAINS, time) | {"bp": "e"}

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


def _flow(phase: str, completion: Completion, process: int, thread: int, time: int) -> Event:
    event = {"ph": phase, "cat": "trained", "name": "trained", "id": completion.id}
    return event | {"pid": process, "tid": thread, "ts": time}


def _known(values: Event) -> Event:
    return {name: value for name, value in values.items() if value is not None}
