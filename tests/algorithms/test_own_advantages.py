"""Advantages of the user's own."""

from pathlib import Path

import numpy as np
import pytest

from asyncrl.algorithms.registry import entry
from asyncrl.config.algorithm import CustomAlgorithm
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import keep_here

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"


def test_the_example_is_against_the_median() -> None:
    settings = CustomAlgorithm(function=f"{EXAMPLE}:loss", advantages=f"{EXAMPLE}:advantages")
    (found,) = entry(settings).advantages(settings, [np.array([0.0, 1.0, 2.0, 10.0])])
    assert found.tolist() == [-1.5, -0.5, 0.5, 8.5]


@pytest.mark.parametrize("wrong", [[1.0], [1.0, float("nan")], [[1.0], [2.0]]])
def test_what_are_no_advantages_is_refused(wrong: object) -> None:
    settings = CustomAlgorithm(function=f"{EXAMPLE}:loss", advantages=keep_here(lambda _: wrong, "test/advantages"))
    with pytest.raises(ConfigError, match=r"algorithm\.advantages=here:test/advantages returned .* one finite number"):
        entry(settings).advantages(settings, [np.array([0.0, 1.0])])
