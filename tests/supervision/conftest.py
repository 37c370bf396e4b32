"""One tiny model for all the runs."""

from pathlib import Path

import pytest

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = WarmStart(hidden_size=32, heads=2, intermediate_size=64, steps=2, batch_tokens=64)
    return make_model(shape, ChainsTask(), 0, tmp_path_factory.mktemp("model"))
