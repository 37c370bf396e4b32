"""No progress for `flow.stall_timeout_s` ends the run with one sentence that says why.

It is a thread, because the event loop itself may hang. It probes every actor from time to time; when no group was
completed, no step taken, no version published and no held-out prompt completed for too long, it takes a snapshot,
explains it, writes `stall.txt`, which also has the stacks, and `stall.json`, and ends the run: actors that hang are
killed, the others are closed. If that takes too long as well, or an interrupted run does not end, it ends the process.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from rich.markup import escape

from actors.runtime import health_probe
from actors.runtime.call_tracing import CallTrace, TracingSpawner
from actors.runtime.spawn import Spawner
from asyncrl.config import Run
from asyncrl.errors import StallError
from asyncrl.observe.diagnosis import report
from asyncrl.observe.diagnosis.explain import explain
from asyncrl.observe.diagnosis.snapshot import Explanation, Snapshot
from asyncrl.system.run_directory import RunDirectory
from pipelines.supervision.observer import Observer
from pipelines.supervision.stopping import INTERRUPTED
from pipelines.supervision.supervisor import leave

T = TypeVar("T")
PROGRESS = {
    "spawn": "the start of {}",
    "start": "the start of {}",
    "restore": "a checkpoint loaded by the {}",
    "take": "a delivery of groups",
    "accumulate": "a forward and backward",
    "step": "an update",
    "save": "a checkpoint of the {}",
    "load_weights": "a version acknowledged by {}",
    "evaluate": "an evaluation by {}",
}
"""Methods whose return is progress, and the words for it."""
STARTING_S = 900.0
"""Least limit while actors are placed and engines load their models."""
BACKSTOP_S = 60.0
"""Added to the deadline of single waits, so that the watchdog, which explains more, fires first."""
ASK_S = 5.0
CLOSE_S = 15.0
"""For the actors that still answer to close."""
END_S = 45.0
"""For the whole process to end."""


def backstop(run: Run) -> float:
    """Deadline of a wait inside an actor."""
    return run.flow.stall_timeout_s + BACKSTOP_S


class Watchdog:
    """Context manager around a run; `over` makes a spawner whose actors are watched, `guard` runs the pipeline."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        say: Callable[[str], None],
        record: Callable[[str, dict[str, Any]], None],
        at_exit: Callable[[str, str], object],
    ) -> None:
        """`record` writes events; `at_exit` gets status and error before the process is ended with `os._exit`."""
        self._directory, self._say, self._record, self._at_exit = directory, say, record, at_exit
        self._limit_s = run.flow.stall_timeout_s
        self._calls = CallTrace(self._ended)
        self._ask_s = min(ASK_S, self._limit_s / 4)
        self._observer = Observer(run, self._calls, self._ask_s)
        self._last = ("the start", time.monotonic())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Future[None] | None = None
        self._verdict: Explanation | None = None
        self._hung: list[str] = []
        self._exit_by: float | None = None
        """When the process of an interrupted run has to be gone."""
        self._reported_silent: set[str] = set()
        self._probing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        report.clear(self._directory.path)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(END_S)

    def over(self, spawner: Spawner) -> Spawner:
        return TracingSpawner(spawner, self._calls)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the pipeline; StallError if it makes no progress."""
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._observer.begin()
        self.progress("the start")
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._end}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._exit_by = time.monotonic() + END_S
            raise
        finally:
            self._loop = None
            if not task.done():
                task.cancel()
                self._kill_hung()
                await asyncio.wait({task}, timeout=CLOSE_S)
            with self._probing:  # the cluster must not go away in the middle of a probe
                pass
        if self._verdict is not None:
            raise StallError(self._sentence(self._verdict))
        return task.result()

    def progress(self, what: str) -> None:
        self._last = what, time.monotonic()
        self._observer.progressed()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _ended(self, actor: str, method: str) -> None:
        if method in PROGRESS:
            self.progress(PROGRESS[method].format(actor))

    def _watch(self) -> None:
        interval = min(10.0, self._limit_s / 8)
        before = time.monotonic()
        while not self._over.wait(interval):
            if (late := time.monotonic() - before - interval) > max(1.0, interval):
                self._last = self._last[0], self._last[1] + late  # this very process was stopped, or the machine slept
            if self._exit_by is not None and time.monotonic() > self._exit_by:
                self._exit("interrupted", f"KeyboardInterrupt: not everything ended within {END_S:g} s", INTERRUPTED)
            with self._probing:
                stall = self._check() if self._loop is not None else None
            if stall is not None:
                self.end(stall[0], hopeless=stall[1].driver_blocked)
            before = time.monotonic()

    def _check(self) -> tuple[Explanation, Snapshot] | None:
        if news := self._observer.poll():
            self.progress(news)
        self._report_silent()
        limit_s = max(self._limit_s, STARTING_S) if self._observer.starting else self._limit_s
        what, at = self._last
        return self._stall(what, at) if time.monotonic() - at >= limit_s else None

    def _report_silent(self) -> None:
        """Report each actor that does not answer once, also while the run can go on without it."""
        silent = self._observer.silent(self._limit_s / 2)
        for name in silent.keys() - self._reported_silent:
            view = silent[name]
            how = "is stopped (SIGSTOP)" if view.health == "stopped" else "does not answer"
            self._record("silent", {"actor": name, "health": view.health, "seconds": view.silent_s})
            self._say(f"{name} {how}; the run goes on as long as it can")
        self._reported_silent = set(silent)

    def _stall(self, what: str, at: float) -> tuple[Explanation, Snapshot] | None:
        snapshot = self._observer.snapshot(time.monotonic() - at, what, driver_blocked=self._driver_blocked())
        if self._last != (what, at):  # it was only slow
            return None
        explanation = explain(snapshot)
        stacks = self._observer.stacks(explanation.suspects, snapshot)
        try:
            report.write(self._directory.path, explanation, snapshot, stacks)
            self._record("stall", {"sentence": explanation.sentence, "chain": explanation.chain})
        except OSError as error:
            self._say(f"what follows could not be written into {self._directory.path}: {error}")
        self._say(escape(f"{explanation.sentence}\n\n{report.chain(explanation)}\n"))
        self._hung = [view.name for view in snapshot.actors.values() if view.health != "answers"]
        return explanation, snapshot

    def _driver_blocked(self) -> bool:
        answered = threading.Event()
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(answered.set)
        return not answered.wait(self._ask_s)

    def end(self, explanation: Explanation, *, hopeless: bool) -> None:
        """Stop the pipeline, or, where that is `hopeless` or takes too long, the process."""
        self._verdict = explanation
        if (loop := self._loop) is not None and self._end is not None:
            with suppress(RuntimeError):  # the run has ended in this very moment
                loop.call_soon_threadsafe(self._end.set_result, None)
        if not self._over.wait(0.0 if hopeless else END_S):
            self._exit("failed", f"StallError: {self._sentence(explanation)}", StallError.exit_code)

    def _sentence(self, explanation: Explanation) -> str:
        return f"{explanation.sentence}; stacks are in {self._directory.path / report.TEXT}"

    def _exit(self, status: str, error: str, code: int) -> None:
        leave(error.partition(": ")[2], code, lambda: self._at_exit(status, error))

    def _kill_hung(self) -> None:
        for name in self._hung:
            health_probe.kill(self._calls.actors[name])
