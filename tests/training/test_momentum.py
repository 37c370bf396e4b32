"""Momentum by the age of samples, by hand."""

import pytest

from asyncrl.training.momentum import Momentum
from tests.support.buffer_stores import trajectory


def observed(momentum: Momentum, version: int, versions: list[int]) -> None:
    momentum.begin()
    momentum.observe([trajectory(0, sample, version=each) for sample, each in enumerate(versions)], version)


def test_the_mean_age_of_a_step_is_what_counts() -> None:
    momentum = Momentum(0.9, shortened=True)
    observed(momentum, 5, [5, 3])
    assert momentum.beta1 == pytest.approx(0.81)
    observed(momentum, 5, [5, 5])
    assert momentum.beta1 == 0.9


def test_synchronous_samples_change_no_bit() -> None:
    momentum = Momentum(0.9, shortened=True)
    for step in range(1, 50):
        observed(momentum, step, [step, step])
        assert (momentum.beta1, momentum.applied(step)) == (0.9, 1.0)


def test_it_can_be_turned_off() -> None:
    momentum = Momentum(0.9, shortened=False)
    observed(momentum, 5, [1, 1])
    assert (momentum.beta1, momentum.applied(1)) == (0.9, 1.0)


def test_the_first_moment_is_divided_by_the_sum_of_its_weights() -> None:
    """Ages 0, 1 and 2: gradients of 1 must give a first moment of 1 in every step."""
    momentum, moment = Momentum(0.9, shortened=True), 0.0
    for step, age in enumerate([0, 1, 2], start=1):
        observed(momentum, 10, [10 - age])
        moment = momentum.beta1 * moment + (1 - momentum.beta1)
        assert moment / (1 - momentum.beta1**step) * momentum.applied(step) == pytest.approx(1.0)
