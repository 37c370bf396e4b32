"""The engines of a simulated run: tickets are distributed as `pipelines.fleet.engine_pool` does, finished completions
go the way of `actors.rollout.delivery` into the real buffer."""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

from asyncrl.buffer.replay import Sample
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Run
from asyncrl.drop_reasons import DropReason
from asyncrl.fleet.concurrency import gather_seconds
from asyncrl.simulation.clock import Clock, Signal
from asyncrl.simulation.engine import Answer, Pace, SimulatedEngine, Work
from asyncrl.simulation.outcome import Meter
from asyncrl.simulation.profile import Answers, Profile
from asyncrl.types import Slot, Ticket

BYTES_PER_TOKEN = 12
"""Token id, log-probability and version, as the buffer counts them."""
OVERHEAD_BYTES = 2048


class _Counted(bytes):
    """A payload of which only the size matters."""

    size: int

    def __len__(self) -> int:
        return self.size


class Rollouts:
    def __init__(
        self, run: Run, profile: Profile, clock: Clock, buffer: TrajectoryBuffer, changed: Signal, slots: Signal
    ) -> None:
        """`changed` is notified when there may be more to train on, `slots` when there may be more to admit."""
        self._run, self._profile, self._clock, self._buffer = run, profile, clock, buffer
        self._changed, self._slots = changed, slots
        self._dynamic = run.algorithm.dynamic_sampling
        self._one_by_one = run.elastic.on or run.concurrency.adaptive
        """Each group is a call of its own, as in `pipelines.fleet.engine_pool`."""
        self.short_of_memory = False
        """Whether the last refusal of a ticket was about memory, so that every stored sample may change the answer."""
        self.answers = Answers(
            profile, seed=run.seed, group_size=run.rollout.group_size, max_tokens=run.rollout.max_tokens
        )
        self._pace = Pace(profile.engine)
        self._gather = 0.0
        self._stretch = 1.0
        self.busy = 0
        """Engines that have something to do; counted where somebody watches."""
        self._watcher: Callable[[], None] = lambda: None
        self._version = 0
        self._numbers = count()
        self.engines: dict[int, SimulatedEngine] = {}
        self._least: list[tuple[int, int]] = []
        """Load and number of every engine; entries that do not hold any more are passed over."""
        self._groups: deque[tuple[float, int, int]] = deque()
        """Deadline, group and engine, of those whose deadline is not over."""
        self.oldest: dict[int, list[int]] = {}
        """Versions of the first tokens of each group's stored samples."""
        self._gone = Meter(0.0, 0.0, 0.0, 0.0, 0.0)
        self._judged = 0.0
        """When the reward workers will be through with what they have."""

    def join(self, engines: int) -> None:
        """Further ones, which serve what all serve."""
        busy = self._count_busy if self._profile.sharing.trainer else None
        for number in (next(self._numbers) for _ in range(engines)):
            engine = self.engines[number] = SimulatedEngine(number, self._pace, self._clock, self._finished, busy)
            engine.version = self._version
            engine.slow(self._stretch)
            heappush(self._least, (0, number))
        fixed = self._profile.reward.gather
        self._gather = gather_seconds(max(len(self.engines), self._run.elastic.max)) if fixed is None else fixed

    def leave(self, engines: int) -> None:
        """The newest go; their completions are continued elsewhere, from where they are."""
        left = [self.engines.pop(number) for number in sorted(self.engines)[-engines:]]
        shares: dict[int, list[Answer]] = {}
        for engine in left:
            for answer in engine.withdraw(lambda _: True):
                self._add(shares, self._choose(1), answer)
        self._submit(shares)
        self._gone = self._sum(left)

    def meter(self) -> Meter:
        """Counters of all engines that were there."""
        for engine in self.engines.values():
            engine.settle()
        return self._sum(self.engines.values())

    def _sum(self, engines: Iterable[SimulatedEngine]) -> Meter:
        before, now = self._gone, self._clock.now
        return Meter(
            now,
            before.engine_seconds + sum(now - engine.born for engine in engines),
            before.busy_seconds + sum(engine.busy_seconds for engine in engines),
            before.row_seconds + sum(engine.row_seconds for engine in engines),
            before.generated + sum(engine.generated for engine in engines),
        )

    def share(self, tickets: Iterable[Ticket]) -> None:
        """Each group to the engine with the least to do."""
        shares: dict[int, list[Answer]] = {}
        first = not self._groups
        for ticket in tickets:
            number = self._choose(len(ticket.samples))
            lengths, _ = self.answers.of(ticket.group)
            for sample in ticket.samples:
                answer = Answer(ticket.group, sample, lengths[sample], self._profile.prompt_tokens)
                self._add(shares, number, answer)
            self._groups.append((ticket.deadline, ticket.group, number))
        self._submit(shares)
        if first and self._groups:
            self._clock.at(self._groups[0][0], self._expire, None)

    def stand_still(self, seconds: float) -> None:
        for engine in self.engines.values():
            engine.stand_still(seconds)

    def slow(self, stretch: float) -> None:
        """All that engines do takes so many times as long from now on."""
        self._stretch = stretch
        for engine in self.engines.values():
            engine.slow(stretch)

    def watch_busy(self, changed: Callable[[], None]) -> None:
        """Tell whenever an engine gets something to do, or has nothing left."""
        self._watcher = changed

    def _count_busy(self, change: int) -> None:
        self.busy += change
        self._watcher()

    def serve(self, version: int) -> None:
        self._version = version
        for engine in self.engines.values():
            engine.serve(version, recompute=self._run.rollout.on_update == "recompute")

    def _choose(self, samples: int) -> int:
        while True:
            load, number = heappop(self._least)
            engine = self.engines.get(number)
            if engine is not None and engine.load == load:
                self._weigh(engine, samples)
                return number

    def _weigh(self, engine: SimulatedEngine, samples: int) -> None:
        engine.load += samples
        heappush(self._least, (engine.load, engine.number))

    def _add(self, shares: dict[int, list[Answer]], number: int, answer: Answer) -> None:
        answers = shares.setdefault(number, [])
        joins = answers and (answers[-1].group == answer.group or not self._one_by_one)
        answer.work = answers[-1].work if joins else Work()
        answer.work.samples += 1
        answer.work.left += 1
        answers.append(answer)

    def _submit(self, shares: dict[int, list[Answer]]) -> None:
        for number, answers in shares.items():
            self.engines[number].submit(answers)

    def _finished(self, engine: SimulatedEngine, answer: Answer) -> None:
        if not engine.outbox:
            self._clock.at(self._clock.now + self._gather, self._judge, engine)
        engine.outbox.append(answer)

    def _judge(self, engine: SimulatedEngine) -> None:
        answers, engine.outbox = engine.outbox, []
        seconds = len(answers) * self._profile.reward.seconds / self._run.reward.workers
        self._judged = max(self._judged, self._clock.now) + seconds
        arrival = self._judged + self._profile.reward.latency
        if arrival > self._clock.now:
            self._clock.at(arrival, self._append, (engine, answers))
        else:
            self._append((engine, answers))

    def _append(self, judged: tuple[SimulatedEngine, list[Answer]]) -> None:
        engine, answers = judged
        self._buffer.append_checked([self._sample(answer) for answer in answers])
        completed = False
        for answer in answers:
            versions = self.oldest.setdefault(answer.group, [])
            versions.append(answer.oldest)
            completed |= len(versions) == self._run.rollout.group_size
            self._end(engine, answer)
        dropped = self._dynamic and self._buffer.expire(self._clock.now)
        if completed:
            self._clock.notify(self._changed)
        if dropped or self.short_of_memory:
            self._clock.notify(self._slots)

    def _sample(self, answer: Answer) -> Sample:
        """Rewards of a group differ, or they do not; what they are does not matter."""
        payload = _Counted()
        payload.size = BYTES_PER_TOKEN * (answer.length + answer.prompt) + OVERHEAD_BYTES
        reward = float(answer.sample) if self.answers.of(answer.group)[1] else 0.0
        return Sample(Slot(answer.group, answer.sample), payload, answer.length, answer.oldest, reward)

    def _end(self, engine: SimulatedEngine, answer: Answer) -> None:
        answer.work.left -= 1
        if not answer.work.left:
            self._weigh(engine, -answer.work.samples)

    def _expire(self, _: None) -> None:
        """Deadlines only rise: the first one is the next."""
        now = self._clock.now
        dropped = set(self._buffer.expire(now))
        over: dict[int, set[int]] = {}
        while self._groups and self._groups[0][0] <= now:
            group, number = self._groups.popleft()[1:]
            if group in dropped and number in self.engines:
                over.setdefault(number, set()).add(group)
        for number, groups in over.items():
            self._abort(self.engines[number], lambda answer, groups=groups: answer.group in groups)
        if self._groups:
            self._clock.at(self._groups[0][0], self._expire, None)
        if dropped:
            self._clock.notify(self._changed)
            self._clock.notify(self._slots)

    def _abort(self, engine: SimulatedEngine, which: Callable[[Answer], bool]) -> None:
        for answer in engine.withdraw(which):
            self._buffer.fail(Slot(answer.group, answer.sample), DropReason.TIMEOUT, int(answer.done))
            self._end(engine, answer)
