"""Published figures that the simulator should come near to."""

import pytest

from benchmarks.published import projected_lines, verl_lines
from benchmarks.published_clusters import (
    MISSED,
    missed,
    nemo_dense_lines,
    nemo_sparse_lines,
    training_lines,
    update_lines,
)


@pytest.mark.slow
def test_the_projection_to_235b_is_met_within_a_tenth() -> None:
    lines = list(projected_lines())
    assert len(lines) == 8
    assert all(abs(line.error) < 0.1 for line in lines), lines


@pytest.mark.slow
def test_the_steps_of_verl_are_met_within_a_seventh() -> None:
    lines = list(verl_lines())
    assert len(lines) == 6
    assert all(abs(line.error) < 1 / 7 for line in lines), lines


def test_trainers_and_weight_updates_are_met_but_for_those_that_are_named() -> None:
    lines = [*training_lines(), *update_lines()]
    assert all(abs(line.error) < 0.005 for line in lines if line.kind == "fitted"), lines
    assert sum(line.kind == "predicted" for line in lines) == 14
    assert missed(lines) == {row for row in MISSED if not row.startswith("NeMo-RL")}


@pytest.mark.slow
def test_steps_of_nemo_rl_are_met_but_for_those_that_are_named() -> None:
    lines = [*nemo_dense_lines(), *nemo_sparse_lines()]
    assert all(abs(line.error) < 0.02 for line in lines if line.kind == "fitted"), lines
    assert sum(line.kind == "predicted" for line in lines) == 15
    assert missed(lines) == {row for row in MISSED if row.startswith("NeMo-RL")}
