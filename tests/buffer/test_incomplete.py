"""Groups of which samples fail: dropped, or trained on without them; every slot is counted once in both cases."""

import random
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.reader import read_failures
from asyncrl.buffer.store import TrajectoryBuffer
from asyncrl.config import Flow, Rollout, Run
from asyncrl.config.run import check
from asyncrl.errors import ConfigError
from asyncrl.observe.audit.audit import audit
from asyncrl.observe.query.tables import read_buffer
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.types import Delivery, Slot, Ticket
from tests.support.buffer_stores import open_buffer, payload

TERMS: dict[str, Any] = {"group_size": 4, "groups_per_step": 1, "incomplete_min": 2}


def admit(buffer: TrajectoryBuffer, now: float = 0.0) -> int:
    ticket = buffer.admit(now)
    assert isinstance(ticket, Ticket)
    return ticket.group


def test_the_rest_of_a_group_is_trained_on(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **TERMS)
    group = admit(buffer)
    buffer.append_many([payload(group, sample) for sample in (0, 3)])
    assert buffer.fail(Slot(group, 1), "reward_error", tokens=5).status == "dropped"
    assert buffer.take(1) is None, "one sample is still being generated"
    buffer.append(payload(group, 2))
    delivery = buffer.take(1)
    assert delivery == Delivery(step=0, groups=(group,))
    assert buffer.read(delivery) == [payload(group, sample) for sample in (0, 2, 3)]
    buffer.commit(0)
    ledger = buffer.ledger()
    assert (ledger.leased, ledger.consumed, ledger.dropped) == (4, 3, {"reward_error": 1})
    assert buffer.waste() == {"reward_error": 5}
    assert buffer.append(payload(group, 1)).status == "dropped", "a retry is no sample, and no second waste"
    assert buffer.waste() == {"reward_error": 5}
    buffer.close()
    assert read_failures(tmp_path) == {group: 1}
    found = audit(tmp_path, "test-run", {"step-1": TrainingManifest(step=1, samples_trained=3, consumed=((0, 0),))})
    assert found.sound, found.violations
    assert found.ledger == ledger
    _, outcomes = read_buffer(tmp_path)
    assert (outcomes.missing.tolist(), outcomes.failures) == ([1], {"reward_error": 1})


def test_below_the_minimum_the_group_is_dropped_and_nothing_counts_twice(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **TERMS)
    group = admit(buffer)
    buffer.append(payload(group, 0))
    for sample in (1, 2, 3):
        buffer.fail(Slot(group, sample), "reward_timeout", tokens=sample)
    assert buffer.ledger().dropped == {"reward_timeout": 3, "group_incomplete": 1}
    assert buffer.waste() == {"reward_timeout": 6, "group_incomplete": 5}
    assert (buffer.ledger().balanced, buffer.ledger().in_flight, buffer.status().bytes) == (True, 0, 0)
    assert audit(tmp_path, "test-run", {}).sound


def test_what_is_not_finished_in_time_is_left_out(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **TERMS, max_staleness=2)
    first, second = admit(buffer), admit(buffer)
    buffer.append_many([payload(first, sample) for sample in range(3)] + [payload(second, 0)])
    assert buffer.expire(now=10.0) == (first, second)
    assert buffer.ledger().dropped == {"timeout": 5}, "one of the first group, all of the second"
    delivery = buffer.take(2)
    assert delivery is not None
    assert (delivery.groups, len(buffer.read(delivery))) == ((first,), 3)
    buffer.commit(0)
    assert buffer.append(payload(first, 3)).status == "dropped"
    assert buffer.append(payload(first, 3)).status == "dropped"
    assert buffer.waste() == {"timeout": 10}, "the tokens that arrived late, once, and those of the second group"
    assert audit(tmp_path, "test-run", {}).sound


def test_an_uninformative_rest_is_dropped(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, **TERMS | {"group_size": 3}, drop_uninformative=True)
    group = admit(buffer)
    buffer.append_many([payload(group, 0), payload(group, 1)])  # their rewards are 0 and 1
    buffer.fail(Slot(group, 2), "reward_error")
    assert buffer.expire(0.0) == ()
    assert buffer.take(1) is not None


@pytest.mark.parametrize(("incomplete_min", "trained"), [(0, 0.44), (2, 1.0)])
def test_how_many_groups_of_16_are_trained_on_when_5_percent_of_rewards_fail(
    tmp_path: Path, incomplete_min: int, trained: float
) -> None:
    rng = random.Random(0)
    terms = {"group_size": 16, "groups_per_step": 1, "incomplete_min": incomplete_min, "max_staleness": 1}
    buffer = open_buffer(tmp_path, durability="memory", **terms)
    for number in range(400):
        group = admit(buffer)
        for sample in range(16):
            if buffer.awaits(Slot(group, sample)):
                if rng.random() < 0.05:
                    buffer.fail(Slot(group, sample), "reward_error")
                else:
                    buffer.append(payload(group, sample, buffer.status().version, tokens=1))
        if buffer.take(1) is not None:
            step = buffer.status().step
            buffer.commit(step)
            buffer.advance(step + 1)
        assert buffer.ledger().balanced, number
    assert buffer.status().step / 400 == pytest.approx(trained, abs=0.08)


@pytest.mark.parametrize(
    ("least", "said"),
    [(9, "flow.incomplete_min=9 is more than rollout.group_size=8"), (1, "groups of one sample, with nothing to")],
)
def test_settings_that_make_no_sense_are_refused(least: int, said: str) -> None:
    check(Run(flow=Flow(incomplete_min=least)))
    with pytest.raises(ConfigError, match=said):
        check(Run(flow=Flow(incomplete="train_rest", incomplete_min=least), rollout=Rollout(group_size=8)))
