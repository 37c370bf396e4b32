"""One small warm-started model for all the runs."""

from pathlib import Path

import pytest

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Too short a start to be any good at the task; it ends most answers, which is what bookkeeping needs."""
    directory = tmp_path_factory.mktemp("model")
    return make_model(WarmStart(steps=40), ChainsTask(), 0, directory)
