"""What the driver knows of its actors: probes them from time to time, keeps their reports, and takes the snapshot."""

import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from actors.runtime import health_probe
from actors.runtime.call_tracing import CallTrace
from asyncrl.config import Run
from asyncrl.errors import ActorError
from asyncrl.observe.diagnosis.activity import look
from asyncrl.observe.diagnosis.explain import STARTING
from asyncrl.observe.diagnosis.snapshot import ActorView, Health, Situation, Snapshot
from asyncrl.system import processes

DUMPED = 4
"""Most actors whose stacks are taken."""


class Observer:
    """Used by one thread, the watchdog's. No method takes much longer than the time it is given."""

    def __init__(self, run: Run, calls: CallTrace, ask_s: float) -> None:
        self._run = run
        self._calls = calls
        self._ask_s = ask_s
        self._last_answer: dict[str, float] = {}
        self._reports: dict[str, Situation] = {}
        self._answered: set[str] = set()
        """Actors that answered the last probe."""
        self._dead: set[str] = set()
        self._last_step: dict[str, tuple[int, float]] = {}
        self._completed = self._evaluated = 0
        self._dropped_before: Counter[str] = Counter()

    @property
    def starting(self) -> bool:
        """Something is being placed, started or loaded, which has a longer limit."""
        return any(call.method in STARTING for call in self._calls.open)

    def begin(self) -> None:
        """Reset the counts for a new attempt."""
        self._completed = self._evaluated = 0

    def poll(self) -> str:
        """Probe every actor; returns the progress since the last time in words, or an empty string."""
        answers = health_probe.probe(self._calls.actors.copy(), look, self._ask_s)
        now = time.monotonic()
        self._answered = set(answers)
        for name, report in answers.items():
            self._dead.discard(name)
            if isinstance(report, ActorError):
                self._dead.add(name)
                continue
            self._last_answer[name], self._reports[name] = now, report
            if self._last_step.get(name, (-1, now))[0] != report.steps:
                self._last_step[name] = report.steps, now
        return self._progress_since()

    def _progress_since(self) -> str:
        completed = max((report.completed for report in self._reports.values()), default=0)
        evaluated = sum(report.evaluated for report in self._reports.values())
        news = ""
        if completed > self._completed:
            self._completed, news = completed, "a complete group"
        if evaluated > self._evaluated:
            news = "a held-out completion"
        self._evaluated = evaluated  # fewer than before when an engine was started again
        return news

    def progressed(self) -> None:
        """Forget the drops so far: they do not explain a later stall."""
        self._dropped_before = self._dropped()

    def _dropped(self) -> Counter[str]:
        return sum((Counter(report.dropped) for report in list(self._reports.values())), Counter[str]())

    def silent(self, seconds: float) -> dict[str, ActorView]:
        """Actors that have not answered for so long."""
        now = time.monotonic()
        late = [name for name, answered in self._last_answer.items() if now - answered > seconds]
        return {name: self._view(name, set(), now) for name in late if name in self._calls.actors}

    def snapshot(self, idle_s: float, last_progress: str, *, driver_blocked: bool) -> Snapshot:
        responsive = health_probe.responsive(self._calls.actors.copy(), self._ask_s)
        now = time.monotonic()
        names = [name for name in self._calls.actors.copy() if name in self._reports or name in self._dead]
        return Snapshot(
            idle_s=idle_s,
            last_progress=last_progress,
            calls=self._calls.open,
            actors={name: self._view(name, responsive, now, driver_blocked=driver_blocked) for name in names},
            ended=self._ended(),
            dropped=dict(self._dropped() - self._dropped_before),
            driver_blocked=driver_blocked,
            driver_at=processes.main_thread_at(),
            group_timeout_s=self._run.flow.group_timeout_s,
            reward_function=self._run.reward.function,
            judge=self._run.reward.judge.url,
            harness=self._run.agent.function or " ".join(self._run.agent.command),
        )

    def _ended(self) -> dict[int, str]:
        oldest = [report.buffer.oldest_group for report in self._reports.values() if report.buffer is not None]
        by = {group: self._calls.returned(group) for group in oldest if group is not None}
        return {group: name for group, name in by.items() if name is not None}

    def _view(self, name: str, responsive: set[str], now: float, *, driver_blocked: bool = False) -> ActorView:
        report, answered = self._reports.get(name), self._last_answer.get(name, now)
        view = ActorView(name=name, said=report, silent_s=0.0 if name in self._answered else now - answered)
        if name in self._dead or report is None:
            return msgspec.structs.replace(view, health="dead")
        process = processes.state(report.pid) if report.place == processes.place() else ""
        health: Health = "answers"
        if process == "stopped":
            health = "stopped"
        elif process == "ended":
            health = "dead"
        elif name not in self._answered:
            health = "silent"
        elif name not in responsive and (driver_blocked or health_probe.has_own_process(self._calls.actors[name])):
            health = "busy"
        still = now - self._last_step.get(name, (0, now))[1]
        return msgspec.structs.replace(view, health=health, process=process, still_s=still)

    def stacks(self, suspects: Iterable[str], snapshot: Snapshot) -> dict[str, str]:
        """Of the driver, of the suspects, and of the reward function if it is at work."""
        stacks = {"driver": processes.stacks_from_inside()}
        for name in [name for name in suspects if name in snapshot.actors][:DUMPED]:
            report = snapshot.actors[name].said
            if report is None:
                continue
            if health_probe.has_own_process(self._calls.actors.get(name)):
                stacks[name] = self._stack(name, report)
            for judging in report.judging[:1]:
                what = "agent" if name == "gateway" else "reward function"
                stacks[f"{what} (process {judging.pid})"] = self._outside(judging.pid, report.place)
        return stacks

    def _stack(self, name: str, report: Situation) -> str:
        stack = self._outside(report.pid, report.place)
        if not stack.startswith("("):
            return stack
        inside = health_probe.probe({name: self._calls.actors[name]}, _stacks, self._ask_s).get(name)
        return f"{stack}\n{inside}" if isinstance(inside, str) else f"{stack}\n(and it does not answer)"

    def _outside(self, pid: int, place: str) -> str:
        return processes.stack_from_outside(pid) if place == processes.place() else "(it is on another machine)"


def _stacks(_: object) -> str:
    return processes.stacks_from_inside()
