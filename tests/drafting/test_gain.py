"""What drafting gave, from measured arms."""

import pytest

from asyncrl.drafting.gain import Notice, net_gain
from asyncrl.types import SpeculationArm


def arm(batch: int, depth: int, steps: int, rate: float) -> SpeculationArm:
    return SpeculationArm(batch, depth, depth, steps, rate)


def test_net_gain_weights_each_steps_speed_by_how_often_it_was_used() -> None:
    arms = [arm(1, 0, 10, 100.0), arm(1, 3, 90, 200.0), arm(65, 0, 100, 1000.0)]
    assert net_gain(arms) == pytest.approx((10 * 1.0 + 90 * 2.0 + 100 * 1.0) / 200)


def test_net_gain_is_unknown_without_plain_decoding() -> None:
    assert net_gain([arm(1, 3, 10, 200.0)]) is None
    assert net_gain([]) is None


def test_engines_count_together() -> None:
    one, other = [arm(1, 0, 10, 100.0), arm(1, 2, 30, 150.0)], [arm(1, 0, 30, 200.0), arm(1, 2, 10, 250.0)]
    plain, drafting = (10 * 100 + 30 * 200) / 40, (30 * 150 + 10 * 250) / 40
    assert net_gain(one + other) == pytest.approx((40 * 1.0 + 40 * drafting / plain) / 80)


def test_drafting_that_does_not_pay_is_said_once_and_again_when_it_clearly_does() -> None:
    notice = Notice()
    slow, border, fast = (
        [arm(65, 0, 5, 100.0), arm(65, 2, 5, 80.0), arm(65, 4, 5, rate)] for rate in (91.0, 101.0, 103.0)
    )
    assert notice.changes(slow) == [
        "drafting is off from 65 running completions on: 0.91x of plain decoding with 4 tokens"
    ]
    assert notice.changes(slow) == []
    assert notice.changes(border) == []
    (again,) = notice.changes(fast)
    assert again.startswith("drafting is on again from 65 running completions on: 1.03x")
