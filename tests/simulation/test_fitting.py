"""Least squares that says nothing about what it has not seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.simulation.fitting import Company, fit, slowdown


def test_what_a_span_would_have_taken_alone() -> None:
    """One is at work from 1 to 3.5 and from 4 to 6, another from 3 to 5."""
    company = Company([[(4.0, 6.0), (1.0, 3.0), (2.0, 3.5), (1.5, 2.0)], [(3.0, 5.0)]])
    begin, end = np.array([0.0, 3.0, 1.0, 7.0]), np.array([8.0, 5.0, 2.0, 9.0])
    assert company.alone(begin, end, 0.0) == pytest.approx(end - begin)
    # at a slowdown of 1: nobody 1/1, one other 1/2, both 1/3 of the time
    both, one, none = 0.5 + 1.0, 2.0 + 0.5 + 1.0, 3.0
    assert company.alone(begin, end, 1.0) == pytest.approx([both / 3 + one / 2 + none, 1.5 / 3 + 0.5 / 2, 0.5, 2.0])
    assert company.share(begin, end) == pytest.approx([5 / 8, 1.0, 1.0, 0.0])


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 99))
def test_costs_are_found_where_rows_differ(first: float, second: float, seed: int) -> None:
    columns = np.random.default_rng(seed).uniform(1, 9, (30, 2))
    assert fit(columns, columns @ np.array([first, second])) == pytest.approx([first, second])


def test_what_cannot_be_told_from_nothing_is_nothing() -> None:
    """Forwards of nearly the same size, 10 % of noise: the cost of a forward without tokens is anybody's guess."""
    rng = np.random.default_rng(0)
    tokens = rng.uniform(900, 1100, 40)
    columns = np.stack([np.ones(40), tokens], axis=1)
    seconds = tokens * 0.001 * rng.normal(1, 0.1, 40)
    per_take, per_token = fit(columns, seconds)
    assert per_take == 0
    assert per_token * tokens.sum() == pytest.approx(seconds.sum())
    assert fit(columns, 0.5 + tokens * 0.0005) == pytest.approx([0.5, 0.0005])  # without noise it can be told


def test_a_cost_is_never_below_nothing() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit(columns, columns @ np.array([-0.5, 1.0]))[0] == 0


@given(st.integers(0, 150), st.integers(0, 9))
def test_a_slowdown_is_found_where_company_differs(fiftieths: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, company = rng.uniform(1, 9, (50, 2)), rng.uniform(0, 1, 50)
    seconds = columns @ np.array([0.3, 0.2]) * (1 + fiftieths / 50 * company)
    found = slowdown(columns, lambda f: seconds / (1 + f * company), company)
    assert found == pytest.approx(fiftieths / 50)


def test_where_company_was_always_the_same_nobody_knows() -> None:
    rng = np.random.default_rng(1)
    columns = rng.uniform(1, 9, (50, 2))
    seconds, company = columns.sum(axis=1), np.full(50, 0.98)
    assert slowdown(columns, lambda f: seconds / (1 + f * company), company) is None


def test_a_slowdown_that_noise_explains_as_well_is_none() -> None:
    rng = np.random.default_rng(1)
    columns, company = rng.uniform(1, 9, (50, 2)), rng.uniform(0, 1, 50)
    noisy = columns.sum(axis=1) * rng.normal(1, 0.1, 50)
    assert slowdown(columns, lambda f: noisy / (1 + f * company), company) == 0
