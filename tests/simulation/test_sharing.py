"""Trainer and engines of one machine slow each other down; hand-computed, and found again in what a run leaves."""

from math import isclose

import msgspec
import pytest

from asyncrl.buffer.ledger import Refusal
from asyncrl.config import Buffer, Flow, Rollout, Run
from asyncrl.simulation.calibration import paces
from asyncrl.simulation.clock import Process
from asyncrl.simulation.engine import Answer, SimulatedEngine
from asyncrl.simulation.loop import Simulation, simulate
from asyncrl.simulation.profile import (
    Affine,
    EngineCost,
    Fixed,
    LogNormal,
    Profile,
    RewardCost,
    Sharing,
    SyncCost,
    TrainerCost,
)
from asyncrl.simulation.recordings import Sample, Take, complete
from asyncrl.simulation.sizing import size
from asyncrl.types import Delivery, Ticket

AT_ONCE = RewardCost(gather=0.0)


def one_run(**changes: object) -> Run:
    """Two groups of two answers a step, trained on one after the other."""
    run = Run(
        steps=1,
        max_staleness=0,
        rollout=Rollout(group_size=2, max_tokens=10_000),
        flow=Flow(groups_per_step=2, groups_per_take=1, group_timeout_s=1e6),
        buffer=Buffer(max_bytes=1 << 40),
    )
    return msgspec.structs.replace(run, **changes)


def costs(**changes: object) -> Profile:
    """Alone, a group takes 1 s to decode, one after the other, and 1 s to train on."""
    profile = Profile(
        lengths=Fixed(tokens=100),
        engine=EngineCost(step=Affine(seconds=0.01), max_batch=2),
        trainer=TrainerCost(per_token=0.005),
        reward=AT_ONCE,
    )
    return msgspec.structs.replace(profile, **changes)


@pytest.mark.parametrize(
    ("sharing", "seconds"),
    [
        (Sharing(), 1.0 + 1.0 + 1.0),
        # From 1 s on both are at work. The engine's 1 s takes 1 s; the trainer has done 0.5 s of its own by then.
        (Sharing(trainer=1.0), 1.0 + 1.0 + 0.5 + 1.0),
        # The trainer's 1 s takes 1 s; the engine has done 1 / 1.5 of its own by then.
        (Sharing(engine=0.5), 1.0 + 1.0 + (1 - 1 / 1.5) + 1.0),
        # The engine is through after 1.5 s, in which the trainer has done 0.75 s.
        (Sharing(trainer=1.0, engine=0.5), 1.0 + 1.5 + 0.25 + 1.0),
    ],
)
def test_each_takes_longer_while_the_other_is_at_work(sharing: Sharing, seconds: float) -> None:
    assert isclose(simulate(one_run(), costs(sharing=sharing)).rates.step_seconds, seconds)


def test_every_engine_at_work_slows_the_trainer() -> None:
    """Both groups are decoded at once, by two engines: 1 s. The last of three then has the other two for company."""
    run = one_run(flow=Flow(groups_per_step=3, groups_per_take=1, group_timeout_s=1e6))
    lengths = costs(sharing=Sharing(trainer=0.25))
    # 0 to 1: three engines decode a group each. 1 to 4: training, alone.
    assert isclose(simulate(run, lengths, engines=3).rates.step_seconds, 4.0)
    # One engine gets the third group as well: the first take has its company for 1 s, in which 0.8 s are done.
    assert isclose(simulate(run, lengths, engines=2).rates.step_seconds, 1.0 + 1.0 + 0.2 + 2.0)


def test_an_engine_that_joins_while_the_trainer_is_at_work_is_slow_too() -> None:
    simulation = Simulation(one_run(), costs(), engines=0, trainer_gpus=1, warm_up=0)
    simulation.rollouts.slow(2.0)
    simulation.rollouts.join(1)
    assert isclose(simulation.run().rates.step_seconds, 2 * 2.0 + 1.0)  # the first group is trained on meanwhile


def test_the_way_to_an_engine_and_to_the_buffer_takes_time() -> None:
    far = costs(engine=EngineCost(step=Affine(seconds=0.01), max_batch=4, begin_seconds=0.3))
    run = one_run(flow=Flow(groups_per_step=2, groups_per_take=2, group_timeout_s=1e6))
    assert isclose(simulate(run, far).rates.step_seconds, 0.3 + 1.0 + 2.0)
    asking = costs(trainer=TrainerCost(per_step=4.0, per_ask=1.0))
    ahead = simulate(msgspec.structs.replace(run, steps=10, max_staleness=1), asking, warm_up=2).rates
    assert isclose(ahead.step_seconds, 4.0 + 1.0)  # groups are there, and have to be asked for
    assert isclose(ahead.trainer_wait, 1 / 5)


@pytest.mark.parametrize(("engines", "gather"), [(1, 0.05), (20, 0.2), (400, 1.0)])
def test_answers_gather_as_long_as_in_a_run(engines: int, gather: float) -> None:
    profile = costs(reward=RewardCost(), engine=EngineCost(step=Affine(seconds=0.01), max_batch=4))
    run = one_run(flow=Flow(groups_per_step=2, groups_per_take=2, group_timeout_s=1e6))
    assert isclose(simulate(run, profile, engines=engines).rates.step_seconds, 1.0 + gather + 2.0)


def test_where_a_cluster_is_split_nobody_shares() -> None:
    run = one_run(steps=3, max_staleness=1)
    assert size(run, costs(sharing=Sharing(trainer=3.0, engine=3.0)), 8) == size(run, costs(), 8)


class Recorder:
    """Takes down a simulated run as a real one is taken down."""

    def __init__(self, run: Run, profile: Profile, monkeypatch: pytest.MonkeyPatch, *, engines: int) -> None:
        self.samples: list[Sample] = []
        self.takes: list[Take] = []
        self._begun: dict[int, float] = {}
        self._simulation = Simulation(run, profile, engines=0, trainer_gpus=1, warm_up=0)
        self._rollouts, self._machine = self._simulation.rollouts, self._simulation._machine
        self._finished, self._compute = self._rollouts._finished, self._machine.compute
        self._admit, self._take = self._simulation.buffer.admit, self._simulation.buffer.take
        self._taken: tuple[int, ...] = ()
        monkeypatch.setattr(self._rollouts, "_finished", self.finished)
        monkeypatch.setattr(self._machine, "compute", self.compute)
        monkeypatch.setattr(self._simulation.buffer, "admit", self.admit)
        monkeypatch.setattr(self._simulation.buffer, "take", self.take)
        self._rollouts.join(engines)

    def run(self) -> None:
        self._simulation.run()

    def admit(self, now: float) -> Ticket | Refusal:
        ticket = self._admit(now)
        if isinstance(ticket, Ticket):
            self._begun[ticket.group] = now
        return ticket

    def finished(self, engine: SimulatedEngine, answer: Answer) -> None:
        now = self._simulation.clock.now
        begun = self._begun[answer.group] + 1e-8 * (4 * answer.group + answer.sample)  # tasks begin one after the other
        self.samples.append(
            Sample(answer.group, f"{engine.number}", begun, now, answer.length, 5, float(answer.sample))
        )
        self._finished(engine, answer)

    def take(self, most: int, fewest: int) -> Delivery | None:
        delivery = self._take(most, fewest)
        self._taken = delivery.groups if delivery else ()
        return delivery

    def compute(self, seconds: float) -> Process:
        begun, groups = self._simulation.clock.now, self._taken
        yield from self._compute(seconds)
        self.takes.append(Take(len(self.takes), begun, begun, self._simulation.clock.now, groups))


@pytest.mark.parametrize(("staleness", "engines"), [(0, 1), (0, 2), (2, 1)])
def test_what_was_put_in_is_found_again(staleness: int, engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(
        lengths=LogNormal(median=100, sigma=0.7, between=0.3),
        engine=EngineCost(step=Affine(seconds=0.002, per_row=0.0005), max_batch=24),
        trainer=TrainerCost(per_token=0.0004, per_take=0.05, per_step=0.02),
        sync=SyncCost(seconds=0.05),
        sharing=Sharing(trainer=0.6, engine=0.5),
        reward=AT_ONCE,
    )
    run = one_run(
        steps=40,
        max_staleness=staleness,
        rollout=Rollout(group_size=4, max_tokens=10_000),
        flow=Flow(groups_per_step=8, groups_per_take=2, group_timeout_s=1e6),
    )
    recorder = Recorder(run, profile, monkeypatch, engines=engines)
    recorder.run()
    step, trainer, sharing = paces(recorder.samples, recorder.takes, complete(recorder.samples, 4), 24)
    assert (sharing.trainer, sharing.engine) == pytest.approx((0.6, 0.5), abs=0.02)
    assert (trainer.per_token, trainer.per_take) == pytest.approx((0.0004, 0.05), rel=0.01)
    assert [step.at(rows) for rows in (4, 24)] == pytest.approx([0.004, 0.014], rel=0.01)
