"""The learning rate over a run."""

import pytest

from asyncrl.config import Run, check
from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.training.learner import learning_rate


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"warmup_steps": 2}, [4, 8, 8, 8, 8, 8]),
        ({"decay_steps": 3}, [8, 8, 8, 6, 4, 2]),
        ({"warmup_steps": 4, "decay_steps": 1}, [2, 4, 6, 8, 8, 4]),
        ({"warmup_steps": 3, "decay_steps": 3}, [8 / 3, 16 / 3, 8, 6, 4, 2]),
    ],
)
def test_it_grows_stays_and_falls(settings: dict[str, int], expected: list[float]) -> None:
    trainer = Trainer(lr=8.0, **settings)
    assert [learning_rate(trainer, step, 6) for step in range(6)] == pytest.approx(expected)


def test_a_decay_that_does_not_fit_is_refused() -> None:
    check(Run(steps=5, trainer=Trainer(warmup_steps=2, decay_steps=3)))
    check(Run(steps=1, trainer=Trainer(warmup_steps=2)))
    with pytest.raises(ConfigError, match=r"trainer\.decay_steps=4 do not fit into steps=5"):
        check(Run(steps=5, trainer=Trainer(warmup_steps=2, decay_steps=4)))
