"""A run on a virtual clock: the loop of `pipelines.async_grpo`, with costs in the places of engines and trainer.

Real are the buffer with its ledger and admission (`asyncrl.buffer`), the staleness controller and the elastic pool's
policy (`asyncrl.flow`): the same code that a run executes, asked in the same order. Simulated is what takes time.
"""

from collections.abc import Iterable
from math import exp
from pathlib import Path

import msgspec

from asyncrl.buffer.ledger import Refusal
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Run
from asyncrl.errors import StallError
from asyncrl.fleet.staleness import StalenessController
from asyncrl.simulation.clock import Clock, Process, Signal
from asyncrl.simulation.outcome import Outcome, Step, rates
from asyncrl.simulation.pool import SimulatedPool
from asyncrl.simulation.profile import Profile
from asyncrl.simulation.rollouts import BYTES_PER_TOKEN, OVERHEAD_BYTES, Rollouts
from asyncrl.simulation.sharing import SharedMachine
from asyncrl.types import Ticket


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
        self._run, self._profile, self._trainer_gpus, self._warm_up = run, profile, trainer_gpus, warm_up
        self._steps = run.steps + warm_up
        self.clock = Clock()
        self.changed = Signal()
        """There may be more to train on."""
        self.places = Signal()
        """There may be more to admit."""
        self._published = Signal()
        self.buffer = _buffer(run, None if warm_up else self._steps)
        self.rollouts = Rollouts(run, profile, self.clock, self.buffer, self.changed, self.places)
        self.rollouts.join(engines)
        self._machine = SharedMachine(profile.sharing, self.clock, self.rollouts)
        self._controller = StalenessController(run.staleness, run.max_staleness)
        self._pool = SimulatedPool(run, profile, self.clock, self.rollouts, self._places)
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

    def _places(self) -> int:
        return (self._controller.decision.effective_staleness + 1) * self._run.samples_per_step

    def _generate(self) -> Process:
        while True:
            yield self._profile.engine.begin_seconds
            self.rollouts.share(self._admitted())
            yield self.places

    def _admitted(self) -> Iterable[Ticket]:
        while not isinstance(ticket := self.buffer.admit(self.clock.now), Refusal):
            yield ticket
        self.rollouts.short_of_memory = bool(ticket.lacking)
        self._short_of_memory |= self.rollouts.short_of_memory

    def _train(self) -> Process:
        flow, trainer = self._run.flow, self._profile.trainer
        for step in range(self._steps):
            waited, groups = 0.0, list[int]()
            while (missing := flow.groups_per_step - len(groups)) > 0:
                begun = self.clock.now
                self._pool.waits.trainer(begun, waits=True)
                yield trainer.per_ask
                while (delivery := self.buffer.take(missing, flow.groups_per_take)) is None:
                    yield self.changed
                self._pool.waits.trainer(self.clock.now, waits=False)
                waited += self.clock.now - begun
                groups += delivery.groups
                yield from self._machine.compute(
                    trainer.per_take + self._tokens(delivery.groups) * trainer.per_token / self._trainer_gpus
                )
            while self._publishing:
                yield self._published
            yield trainer.per_step
            self._note(step, groups, waited)
            self.buffer.commit(step)
            pace = self._controller.observe(self._figures())
            self.buffer.limit(pace.effective_staleness)
            self.clock.notify(self.places)
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
        self.clock.notify(self.places)
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
        max_ready=run.flow.max_ready_groups,
        drop_uninformative=run.algorithm.dynamic_sampling,
    )
