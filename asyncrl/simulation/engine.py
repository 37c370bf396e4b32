"""One engine: a batch of completions that all gain tokens at the same pace.

Between two events nothing changes, so no token is simulated. As in the fake engine there is one clock for all rows,
here `progress`, the tokens that a row would have gained since the start: a completion that joins at p with n tokens to
come is finished at p + n. With b rows and c tokens of context a step takes step(b) + k * c, and c grows by b with each
token, so d more tokens take

    (step(b) + k * c) * d + k * b * d^2 / 2

seconds, which is exact, and solved for d when somebody joins in the middle.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import sqrt

from asyncrl.errors import ConfigError
from asyncrl.simulation.clock import Clock
from asyncrl.simulation.profile import EngineCost

ROUNDING = 1e-6
"""Tokens."""


class Answer:
    """One sample on its way."""

    __slots__ = ("done", "due", "group", "length", "oldest", "prefill", "prompt", "sample", "work")

    work: "Work"

    def __init__(self, group: int, sample: int, length: int, prompt: int) -> None:
        self.group, self.sample, self.length, self.prompt = group, sample, length, prompt
        self.prefill = 0.0 if sample else prompt
        """Tokens to compute before it goes on; the completions of a group share their prompt's."""
        self.done = 0.0
        """Tokens that it had when it last joined or left a batch."""
        self.due = 0.0
        self.oldest = -1
        """Version of its first token; -1 before there is one."""


class Work:
    """What one engine was given in one call; its load falls when all of it is finished."""

    __slots__ = ("left", "samples")

    def __init__(self) -> None:
        self.samples = self.left = 0


class Pace:
    """An engine's costs, by batch size."""

    def __init__(self, cost: EngineCost) -> None:
        self.per_token: list[float] = []
        self.per_context: list[float] = []
        for rows in range(cost.max_batch + 1):
            drafts = cost.speculation
            on = not drafts.up_to_batch or rows <= drafts.up_to_batch
            factor, checked = (drafts.cost / drafts.accepted, 1 + drafts.drafted) if on else (1.0, 1)
            self.per_token.append(cost.step.at(rows * checked) * factor)
            self.per_context.append(cost.per_context_token * factor)
        if not self.per_token[1]:
            raise ConfigError("profile.engine.step takes no time: say how long a decoding step takes, or measure a run")
        self.per_prefilled = cost.per_prefilled_token
        self.max_batch = cost.max_batch


class SimulatedEngine:
    def __init__(
        self,
        number: int,
        pace: Pace,
        clock: Clock,
        finished: Callable[["SimulatedEngine", Answer], None],
        busy: Callable[[int], None] | None = None,
    ) -> None:
        """`busy` is told 1 when the engine gets something to do, and -1 when it has nothing left."""
        self.number = number
        self.version = 0
        self.load = 0
        """Samples that it was given, as the pool counts them."""
        self.outbox: list[Answer] = []
        """Finished, and not yet judged."""
        self.waiting: deque[Answer] = deque()
        self.running = 0
        self.generated = 0.0
        self.busy_seconds = 0.0
        """With at least one completion in the batch."""
        self.row_seconds = 0.0
        self._pace, self._clock, self._finished, self._busy = pace, clock, finished, busy
        self._was_busy = False
        self._stretch = 1.0
        """How much longer everything takes, for others use the same cores."""
        self._due: list[tuple[float, int, int, Answer]] = []
        self._progress = 0.0
        self._context = 0.0
        self.born = self._since = clock.now
        self._ready = clock.now
        """It stands still before: weights are loaded, prompts prefilled."""
        self._events = 0

    def submit(self, answers: list[Answer]) -> None:
        self._advance()
        self.waiting.extend(answers)
        self._fill()
        self._schedule()

    def stand_still(self, seconds: float) -> None:
        self._advance()
        self._ready = max(self._ready, self._clock.now) + seconds
        self._schedule()

    def slow(self, stretch: float) -> None:
        """All it does takes so many times as long from now on."""
        self._advance()
        self._stretch = stretch
        self._schedule()

    def serve(self, version: int, *, recompute: bool) -> None:
        """A weight update; running completions keep their keys and values, or have them computed again."""
        self._advance()
        self.version = version
        if recompute:
            self.stand_still(self._context * self._pace.per_prefilled * self._stretch)

    def withdraw(self, which: Callable[[Answer], bool]) -> list[Answer]:
        """Take completions out, running or not; they know how far they came."""
        self._advance()
        queued = [answer for answer in self.waiting if which(answer)]
        running = [entry[-1] for entry in self._due if which(entry[-1])]
        if queued:
            self.waiting = deque(answer for answer in self.waiting if not which(answer))
        if running:
            self._due = [entry for entry in self._due if not which(entry[-1])]
            heapify(self._due)
            for answer in running:
                answer.done = answer.length - max(0.0, answer.due - self._progress)
                answer.prefill = answer.prompt + answer.done
                self._context -= answer.prefill
            self.running -= len(running)
        self._fill()
        self._schedule()
        return [*running, *queued]

    def settle(self) -> None:
        """Bring the counters up to now."""
        self._advance()

    def _advance(self) -> None:
        now, rows = self._clock.now, self.running
        begin = max(self._since, self._ready)
        if rows:
            self.busy_seconds += now - self._since
            self.row_seconds += rows * (now - self._since)
            if now > begin:
                gained = self._gained(now - begin, rows)
                self._progress += gained
                self._context += rows * gained
                self.generated += rows * gained
        self._since = now

    def _gained(self, seconds: float, rows: int) -> float:
        slope = self._pace.per_context[rows]
        linear, square = self._pace.per_token[rows] + slope * self._context, slope * rows
        seconds /= self._stretch
        if square * seconds < 1e-12 * linear * linear:
            return seconds / linear
        return (sqrt(linear * linear + 2 * square * seconds) - linear) / square

    def _fill(self) -> None:
        while self.waiting and self.running < self._pace.max_batch:
            answer = self.waiting.popleft()
            answer.due = self._progress + answer.length - answer.done
            if answer.oldest < 0:
                answer.oldest = self.version
            if stop := answer.prefill * self._pace.per_prefilled:
                self._ready = max(self._ready, self._clock.now) + stop * self._stretch
            heappush(self._due, (answer.due, answer.group, answer.sample, answer))
            self._context += answer.prompt + answer.done
            self.running += 1

    def _schedule(self) -> None:
        """The next completion to be finished, if nobody joins or leaves before."""
        self._events += 1
        if self._busy is not None and self._was_busy != bool(self._due):
            self._was_busy = not self._was_busy
            self._busy(1 if self._was_busy else -1)
        if not self._due:
            return
        ahead, rows = max(0.0, self._due[0][0] - self._progress), self.running
        slope = self._pace.per_context[rows]
        seconds = (self._pace.per_token[rows] + slope * self._context) * ahead + slope * rows * ahead * ahead / 2
        self._clock.at(max(self._clock.now, self._ready) + seconds * self._stretch, self._arrive, self._events)

    def _arrive(self, event: int) -> None:
        if event != self._events:
            return  # somebody joined or left since
        self._advance()
        due = self._due
        if due:
            self._progress = max(self._progress, due[0][0])
        while due and due[0][0] <= self._progress + ROUNDING:
            answer = heappop(due)[-1]
            answer.done = answer.length
            self.running -= 1
            self._context -= answer.prompt + answer.length
            self._finished(self, answer)
        self._fill()
        self._schedule()
