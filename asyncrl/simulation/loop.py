"""A run on a virtual clock: the loop of `pipelines.blocks`, with costs in place of engines and trainer.

Real are the buffer with its ledger and admission (`asyncrl.buffer`), the staleness controller and the elastic pool's
policy (`asyncrl.fleet`): the same code that a run executes, called in the same order. Simulated is what takes time.
"""

from collections.abc import Callable, Iterable
from math import exp
from pathlib import Path

import msgspec

from asyncrl.buffer.ledger import Refusal
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Run
from asyncrl.errors import StallError
from asyncrl.fleet.elastic import ElasticPolicy, WaitMeter
from asyncrl.fleet.ready_window import ReadyWindow
from asyncrl.fleet.staleness import StalenessController
from asyncrl.simulation.clock import Clock, Process, Signal
from asyncrl.simulation.outcome import Outcome, Step, rates, share
from asyncrl.simulation.profile import Profile, Sharing
from asyncrl.simulation.ranks import on_cluster, training
from asyncrl.simulation.rollouts import BYTES_PER_TOKEN, OVERHEAD_BYTES, Rollouts
from asyncrl.types import Ticket

LOOKS = 20
"""Times per interval that the engines' load is sampled."""
WELL_USED = 0.5
"""Of its share of all slots: from there on an engine counts as used, as in `pipelines.fleet.engine_pool`."""


def simulate(
    run: Run,
    profile: Profile,
    *,
    engines: int | None = None,
    trainer_gpus: int | None = None,
    warm_up: int = 0,
) -> Outcome:
    """The figures of `run.steps` steps, after `warm_up` more that are left out.

    With a warm-up the run has no end either: its last steps are like the others, and engines do not run dry.
    Without a number, engines are `rollout.replicas` and the trainer's GPUs the profile's.
    """
    engines = run.rollout.replicas if engines is None else engines
    trainer_gpus = profile.trainer.gpus if trainer_gpus is None else trainer_gpus
    return Simulation(run, profile, engines=engines, trainer_gpus=trainer_gpus, warm_up=warm_up).run()


class Simulation:
    def __init__(self, run: Run, profile: Profile, *, engines: int, trainer_gpus: int, warm_up: int) -> None:
        profile = on_cluster(profile, engines=engines, trainer_gpus=trainer_gpus)
        # A split is a run of so many engines: how many groups are kept ready depends on it.
        run = msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, replicas=engines))
        self._run, self._profile, self._trainer_gpus, self._warm_up = run, profile, trainer_gpus, warm_up
        self._steps = run.steps + warm_up
        self.clock = Clock()
        self.changed = Signal()
        """There may be more to train on."""
        self.slots = Signal()
        """There may be more to admit."""
        self._published = Signal()
        self.buffer = _buffer(run, None if warm_up else self._steps)
        self.rollouts = Rollouts(run, profile, self.clock, self.buffer, self.changed, self.slots)
        self.rollouts.join(engines)
        self._train_seconds = training(profile, trainer_gpus, self.rollouts.answers.some())
        self._machine = SharedMachine(profile.sharing, self.clock, self.rollouts)
        self._controller = StalenessController(run.staleness, run.max_staleness)
        self._window = ReadyWindow(run)
        self._pool = SimulatedPool(run, profile, self.clock, self.rollouts, self._slots)
        self._served = 0
        self._publishing = False
        self._publications = 0
        self._short_of_memory = False
        self._done: list[Step] = []
        self._begin = self.rollouts.meter()

    def run(self) -> Outcome:
        self.clock.start(self._generate())
        self.clock.start(self._train())
        self.clock.start(self._pool.watch())
        if not self.clock.run(lambda: self._served == self._steps):
            raise StallError(f"the simulated run stands still at step {len(self._done)}: {self.buffer.status()}")
        return self._outcome()

    def _slots(self) -> int:
        return (self._controller.decision.effective_staleness + 1) * self._run.samples_per_step

    def _generate(self) -> Process:
        while True:
            yield self._profile.engine.begin_seconds
            self.rollouts.share(self._admitted())
            yield self.slots

    def _admitted(self) -> Iterable[Ticket]:
        while not isinstance(ticket := self.buffer.admit(self.clock.now), Refusal):
            yield ticket
        self.rollouts.short_of_memory = bool(ticket.lacking)
        self._short_of_memory |= self.rollouts.short_of_memory

    def _train(self) -> Process:
        flow, trainer = self._run.flow, self._profile.trainer
        for step in range(self._steps):
            started, waited, starved, groups = self.clock.now, 0.0, 0.0, list[int]()
            while (missing := flow.groups_per_step - len(groups)) > 0:
                begun = self.clock.now
                self._pool.waits.trainer(begun, waits=True)
                yield trainer.per_ask
                lacks_fresh = False
                while (delivery := self.buffer.take(missing, flow.groups_per_take)) is None:
                    lacks_fresh |= self.buffer.lacks_fresh
                    yield self.changed
                self.clock.notify(self.slots)
                self._pool.waits.trainer(self.clock.now, waits=False)
                waited += self.clock.now - begun
                starved += lacks_fresh * (self.clock.now - begun)
                groups += delivery.groups
                yield from self._machine.compute(self._train_seconds(self._tokens(delivery.groups)))
            while self._publishing:
                yield self._published
            yield trainer.per_step
            self._note(step, groups, waited)
            self.buffer.commit(step)
            pace = self._controller.observe(self._figures())
            seconds = self.clock.now - started
            ready = self._window.observe(share(waited, seconds), share(starved, seconds))
            self.buffer.limit(pace.effective_staleness, ready)
            self.clock.notify(self.slots)
            if step + 1 - self._served >= pace.publish_every or step + 1 == self._steps:
                self.clock.start(self._publish(step + 1))

    def _tokens(self, groups: Iterable[int]) -> int:
        """That the trainer computes something for."""
        drawn = (self.rollouts.answers.of(group) for group in groups)
        return sum(sum(lengths) for lengths, informative in drawn if informative)

    def _publish(self, version: int) -> Process:
        sync = self._profile.sync
        self._publishing = True
        yield sync.seconds - sync.pause
        if sync.pause:
            self.rollouts.stand_still(sync.pause)
            yield sync.pause
        self.rollouts.serve(version)
        self.buffer.advance(version)
        self._served = version
        self._publications += 1
        self._publishing = False
        self.clock.notify(self.slots)
        self.clock.notify(self._published)

    def _note(self, step: int, groups: Iterable[int], waited: float) -> None:
        """What the step trained on."""
        ages = [step - oldest for group in groups for oldest in self.rollouts.oldest.pop(group)]
        tokens = sum(sum(self.rollouts.answers.of(group)[0]) for group in groups)
        self._done.append(Step(waited, len(ages), tokens, sum(ages), max(ages)))
        if step + 1 == self._warm_up:
            self._begin = self.rollouts.meter()

    def _figures(self) -> dict[str, float]:
        """Of the step, for the controller: a normal log-ratio of variance s has KL = s / 2 and ESS = exp(-s)."""
        last = self._done[-1]
        kl = self._profile.kl_per_version * last.staleness_sum / last.samples
        return {"mismatch_kl": kl, "ess": exp(-2 * kl)}

    def _outcome(self) -> Outcome:
        steps = self._done[self._warm_up :]
        engines = len(self.rollouts.engines)
        return Outcome(
            engines=engines,
            rollout_gpus=engines * self._profile.engine.gpus,
            trainer_gpus=self._trainer_gpus,
            steps=len(steps),
            rates=rates(steps, self._begin, self.rollouts.meter()),
            dropped=self.buffer.ledger().dropped,
            waste=self.buffer.waste(),
            publications=self._publications,
            short_of_memory=self._short_of_memory,
            resizes=tuple(self._pool.decisions),
        )


class SharedMachine:
    """Trainer and engines on one machine: each takes longer while the other is at work.

    Between two events the trainer's pace does not change, so what is left of its work is known when an engine begins or
    ends, and its end is computed again.
    """

    def __init__(self, sharing: Sharing, clock: Clock, rollouts: Rollouts) -> None:
        self._sharing, self._clock, self._rollouts = sharing, clock, rollouts
        self._over = Signal()
        self._left = 0.0
        """Seconds of the trainer's work, as if it were alone."""
        self._stretch = 1.0
        self._since = 0.0
        self._events = 0
        if sharing.trainer:
            rollouts.watch_busy(self._repace)

    def compute(self, seconds: float) -> Process:
        """The trainer works; `seconds` are what it takes alone."""
        if not (self._sharing.trainer or self._sharing.engine):
            yield seconds
            return
        self._left, self._since = seconds, self._clock.now
        self._schedule()
        self._rollouts.slow(1 + self._sharing.engine)
        while self._left:
            yield self._over
        self._rollouts.slow(1.0)

    def _repace(self) -> None:
        """Another number of engines is at work."""
        if self._left:
            now = self._clock.now
            self._left = max(0.0, self._left - (now - self._since) / self._stretch)
            self._since = now
            self._schedule()

    def _schedule(self) -> None:
        self._stretch = 1 + self._sharing.trainer * self._rollouts.busy
        self._events += 1
        self._clock.at(self._clock.now + self._left * self._stretch, self._end, self._events)

    def _end(self, event: int) -> None:
        if event == self._events:  # else the pace has changed since
            self._left = 0.0
            self._clock.notify(self._over)


class SimulatedPool:
    """The elastic pool: the real policy, fed like `pipelines.fleet.elastic` does; engines take time to join."""

    def __init__(self, run: Run, profile: Profile, clock: Clock, rollouts: Rollouts, slots: Callable[[], int]) -> None:
        """`slots`: how many samples may be admitted and not trained on."""
        self._settings, self._cost, self._clock, self._rollouts = run.elastic, profile.engine, clock, rollouts
        self._slots = slots
        self._policy = ElasticPolicy(run.elastic, len(rollouts.engines))
        self.waits = WaitMeter(clock.now)
        self.decisions: list[str] = []

    def watch(self) -> Process:
        while self._settings.on:
            for _ in range(LOOKS):
                self.waits.rollout(self._clock.now, self._empty())
                yield self._settings.interval_s / LOOKS
            self._decide()

    def _decide(self) -> None:
        engines = self._rollouts.engines.values()
        queued = sum(len(engine.waiting) for engine in engines) / max(1, sum(engine.running for engine in engines))
        now, size = self._clock.now, len(engines)
        resize = self._policy.observe(now, size, self.waits.read(now, queued))
        if resize is None:
            return
        self.decisions.append(f"{now:.0f} s: {size} -> {resize.wanted} engines, {resize.reason}")
        if resize.wanted < size:
            self._rollouts.leave(size - resize.wanted)
        else:
            self._clock.start(self._grow(resize.wanted - size))

    def _grow(self, engines: int) -> Process:
        yield self._cost.join_seconds
        self._rollouts.join(engines)

    def _empty(self) -> float:
        """The share of the engines' capacity that is idle because no ticket is given."""
        engines = self._rollouts.engines.values()
        full = WELL_USED * min(self._cost.max_batch, max(1, self._slots() / len(engines)))
        return sum(max(0.0, 1 - engine.load / full) for engine in engines) / len(engines)


def _buffer(run: Run, steps: int | None) -> TrajectoryBuffer:
    """As `actors.buffer` makes it, without files."""
    return TrajectoryBuffer(
        Path(),
        run.name,
        msgspec.structs.replace(run.buffer, durability="memory"),
        group_size=run.rollout.group_size,
        groups_per_step=run.flow.groups_per_step,
        max_staleness=run.max_staleness,
        group_timeout_s=run.flow.group_timeout_s,
        total_steps=steps,
        sample_bytes=BYTES_PER_TOKEN * run.rollout.max_tokens + OVERHEAD_BYTES,
        max_ready=ReadyWindow(run).groups,
        drop_uninformative=run.algorithm.dynamic_sampling,
    )
