"""Published figures that the simulator should come near to."""

import pytest

from benchmarks.published import projected_lines


@pytest.mark.slow
def test_the_projection_to_235b_is_met_within_a_tenth() -> None:
    lines = list(projected_lines())
    assert len(lines) == 8
    assert all(abs(line.error) < 0.1 for line in lines), lines
