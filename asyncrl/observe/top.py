"""A snapshot of a run from its directory: what `asyncrl top` draws. Files are read incrementally."""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.buffer import payloads
from asyncrl.data.arrow import Row, read_row
from asyncrl.data.untrusted import read_table
from asyncrl.errors import CorruptSegmentError
from asyncrl.observe.query.logs import Tail
from asyncrl.observe.report.recorded import driver_of
from asyncrl.system.run_directory import RunDirectory

State = Literal["starting", "running", "ended", "dead"]
STEPS = 10
"""Newest steps that rates and waits are the mean of."""
CURVE = 60
"""Newest steps whose reward is kept."""
COMPLETIONS = 4000
"""Newest completions that the engines' rates are computed from."""
RATE_S = 30.0
"""Seconds before the newest completion that they are computed over."""
START_S = 900.0
"""A run without actors and without events for so long will not start any more."""
EVENTS = 8
QUIET = (
    *("wait_batch", "train", "wait_sync", "update", "publish"),
    *("checkpoint", "checkpoint_written", "environment", "off_policy"),
)
"""What happens in every step is no news."""


class Load(msgspec.Struct, frozen=True):
    """Of an engine at the end of the newest step."""

    version: int
    behind: int
    """Versions between the trainer's and the one it serves."""
    running: int
    waiting: int
    places: int
    """Requests that it can run at a time."""
    busy: float | None
    """Share of the newest steps' time in which it computed; None if it does not report it."""
    cached: float | None = None
    """Share of the newest steps' prompt and history tokens that it found in its cache; None without any."""
    moved: int = 0
    """Samples that went on at other engines because it died or was drained."""


class Engine(msgspec.Struct, frozen=True):
    completions_per_second: float = 0.0
    tokens_per_second: float = 0.0
    mean_seconds: float | None = None
    """Of a completion; None for an engine that has finished none lately."""
    load: Load | None = None
    """None for one that is gone, or before the first step."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: State
    says: str
    """The state in a sentence."""
    step: int
    """Steps that are finished."""
    steps: int
    elapsed: float
    """Seconds in the training loop."""
    remaining: float | None
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    waits: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Shares of the newest steps' time."""
    rewards: tuple[float, ...] = ()
    held_out: float | None = None
    latest: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The newest row of the metrics."""
    engines: dict[str, Engine] = msgspec.field(default_factory=dict[str, Engine])
    events: tuple[dict[str, Any], ...] = ()
    """The newest that are news."""


class Watch:
    """Reads one run again and again."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory.open(path)
        self._settings: dict[str, Any] = msgspec.yaml.decode(self._directory.config.read_bytes())
        self._read_to = 0
        self._written = 0.0
        self._rows: list[dict[str, Any]] = []
        self._step = 0
        self._held_out: float | None = None
        self._begun = self._last_event = 0.0
        self._events_file = 0
        self._news: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._completions: deque[Row] = deque(maxlen=COMPLETIONS)
        self._tail: Tail | None = None

    def look(self) -> Snapshot:
        self._read_events()
        self._read_metrics()
        self._read_completions()
        rows = self._rows
        recent = rows[-STEPS - 1 :]
        seconds = recent[-1]["loop_seconds"] - recent[0]["loop_seconds"] if len(recent) > 1 else 0.0
        state, says = self._state()
        steps = int(self._settings.get("steps", 0))
        done = max(self._step, rows[-1]["step"] + 1 if rows else 0)
        return Snapshot(
            name=self._directory.path.resolve().name,
            state=state,
            says=says,
            step=done,
            steps=steps,
            elapsed=rows[-1]["loop_seconds"] if rows else 0.0,
            remaining=(steps - done) * seconds / (len(recent) - 1) if seconds and state == "running" else None,
            **_rates(recent, seconds),
            rewards=tuple(row["reward"] for row in rows[-CURVE:]),
            held_out=self._held_out,
            latest=rows[-1] if rows else {},
            engines=self._engines(),
            events=tuple(self._news),
        )

    def _read_events(self) -> None:
        if not self._directory.events.exists():
            return
        with self._directory.events.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._events_file:  # the first, or an older half is gone
                self._events_file, self._read_to = number, 0
                self._news.clear()
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):  # torn by a kill, and written on after it
                continue
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        self._last_event = event["time"] + (event.get("seconds") or 0.0)
        match event["kind"]:
            case "update" | "train":
                self._step = event["step"] + (event["kind"] == "update")
            case "environment":
                self._begun = event["time"]
            case "fleet_started":
                self._begun, self._step = event["time"], event["first_step"]
            case "evaluation":
                self._held_out = event["scores"]["sampled"]
            case _:
                pass
        if event["kind"] not in QUIET:
            self._news.append(event)

    def _read_metrics(self) -> None:
        try:
            written = self._directory.metrics.stat().st_mtime
            if written > self._written:
                self._rows, self._written = read_table(self._directory.metrics).to_pylist(), written
        except FileNotFoundError:
            pass  # before the first step

    def _read_completions(self) -> None:
        place = self._directory.trajectories
        if self._tail is None and place.exists():
            self._tail = Tail(place, payloads.STEM, payloads.SCHEMA_HASH, COMPLETIONS)
        for payload in self._tail.read() if self._tail else ():
            try:
                self._completions.append(read_row(payload))
            except ValueError as error:
                raise CorruptSegmentError(f"{place}: {error}: see `asyncrl check`") from None

    def _engines(self) -> dict[str, Engine]:
        end = max((row.finished for row in self._completions), default=0.0)
        recent = [row for row in self._completions if row.finished > end - RATE_S]
        begin = min((row.finished for row in recent), default=end)
        span = max(end - begin, 1.0)
        loads = _loads(self._rows[-STEPS - 1 :], (self._settings.get("engine") or {}).get("max_batch") or 0)
        found: dict[str, Engine] = {}
        for name in sorted({row.engine for row in recent} | loads.keys()):
            own = [row for row in recent if row.engine == name]
            tokens = sum(row.sampled_tokens for row in own)
            seconds = sum(row.finished - row.started for row in own) / len(own) if own else None
            found[name] = Engine(len(own) / span, tokens / span, seconds, loads.get(name))
        return found

    def _state(self) -> tuple[State, str]:
        """A run that was resumed begins again, while the summary of its last attempt still lies there."""
        found = self._directory.read_summary()
        if found is not None and self._directory.summary.stat().st_mtime >= self._begun:
            error = f": {found['error'].splitlines()[0]}" if found.get("error") else ""
            return "ended", f"ended, {found.get('status', 'ok')}{error}"
        quiet = max(0.0, time.time() - (self._last_event or self._directory.config.stat().st_mtime))
        roster = self._directory.actors
        if not roster.exists():
            if self._rows or quiet > START_S:
                return "dead", "dead: it recorded neither its end nor its processes"
            return "starting", f"starting: no actor is placed yet (last event {quiet:.0f} s ago)"
        driver, alive = driver_of(roster)
        if alive:
            return "running", f"running (process {driver}, last event {quiet:.0f} s ago)"
        return "dead", f"dead: its driver, process {driver}, is not on this machine; continue it with `asyncrl resume`"


def _loads(recent: list[dict[str, Any]], places: int) -> dict[str, Load]:
    """By engine; runs of earlier releases did not record it, or not all of it."""
    if not recent or not (told := recent[-1].get("engines")):
        return {}
    now, before = _by_engine(told), _by_engine(recent[0].get("engines") or {}) if len(recent) > 1 else {}
    seconds = recent[-1]["time"] - recent[0]["time"]
    found: dict[str, Load] = {}
    for name, its in now.items():
        first = before.get(name, its)
        worked = its["busy_seconds"] - first["busy_seconds"]  # less than none: it was started again
        busy = min(1.0, worked / seconds) if worked > 0 and seconds > 0 else None
        found[name] = Load(
            version=its["version"],
            behind=recent[-1]["version"] - its["version"],
            running=its["running"],
            waiting=its["waiting"],
            places=places,
            busy=busy,
            cached=_found(its, before.get(name, {})),
            moved=its.get("moved") or 0,
        )
    return found


def _by_engine(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """From a list for each figure."""
    columns = [(name, values) for name, values in told.items() if values]
    rows = zip(*(values for _, values in columns), strict=True)
    figures = [dict(zip((name for name, _ in columns), row, strict=True)) for row in rows]
    return {row["engine"]: row for row in figures}


def _found(its: dict[str, Any], first: dict[str, Any]) -> float | None:
    cached, computed = ((its.get(name) or 0) for name in ("cached_tokens", "prefilled_tokens"))
    earlier_cached, earlier_computed = ((first.get(name) or 0) for name in ("cached_tokens", "prefilled_tokens"))
    if cached >= earlier_cached and computed >= earlier_computed:  # else it was started again
        cached, computed = cached - earlier_cached, computed - earlier_computed
    return cached / (cached + computed) if cached + computed else None


def _rates(recent: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Over the newest steps; the first of `recent` is only where they begin."""
    if not seconds:
        return {}
    steps = recent[1:]

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in steps)

    generated = [row.get("generated_tokens") or 0 for row in (recent[0], recent[-1])]
    return {
        "samples_per_second": total("samples") / seconds,
        "tokens_per_second": (generated[1] - generated[0]) / seconds,
        "waits": {name: min(1.0, total(f"{name}_seconds") / seconds) for name in ("wait", "train", "sync")},
    }
