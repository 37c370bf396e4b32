"""Which settings each step was trained with, however often a run was resumed with others."""

from pathlib import Path

import msgspec
import pytest

from asyncrl.config import Run, Trainer
from asyncrl.system.run_directory import RunDirectory
from pipelines.compose import to_yaml
from pipelines.recording import earlier_settings


class Resumed:
    """A run's directory, changed as `resume` changes it."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self._write(1.0)

    def _write(self, rate: float) -> None:
        run = msgspec.structs.replace(Run(), trainer=Trainer(lr=rate))
        self.directory.config.write_text(to_yaml(run))

    def resume(self, steps: int, rate: float | None = None) -> None:
        earlier_settings.keep(self.directory, steps, changes=rate is not None)
        if rate is not None:
            self._write(rate)

    @property
    def rates(self) -> list[tuple[int, float]]:
        return [(first, run.trainer.lr) for first, run in earlier_settings.by_step(self.directory)]


@pytest.fixture
def run(tmp_path: Path) -> Resumed:
    return Resumed(tmp_path)


def test_each_change_holds_from_its_checkpoint_on(run: Resumed) -> None:
    assert run.rates == [(0, 1.0)]
    run.resume(40, 0.5)
    run.resume(60, 0.25)
    assert run.rates == [(0, 1.0), (40, 0.5), (60, 0.25)]


def test_a_resumption_without_changes_writes_nothing(run: Resumed) -> None:
    run.resume(0)
    run.resume(40)
    assert run.rates == [(0, 1.0)]
    assert not run.directory.earlier_settings.exists()


def test_a_second_change_after_the_same_checkpoint_replaces_the_first(run: Resumed) -> None:
    run.resume(40, 0.5)
    run.resume(40, 0.25)
    assert run.rates == [(0, 1.0), (40, 0.25)]


def test_without_a_checkpoint_every_step_is_taken_again(run: Resumed) -> None:
    run.resume(0, 0.5)
    assert run.rates == [(0, 0.5)]


def test_going_back_forgets_what_later_steps_were_trained_with(run: Resumed) -> None:
    """Somebody removed the newest checkpoints."""
    run.resume(40, 0.5)
    run.resume(60, 0.25)
    run.resume(50)
    assert run.rates == [(0, 1.0), (40, 0.5), (50, 0.25)]
    run.resume(20, 0.125)
    assert run.rates == [(0, 1.0), (20, 0.125)]
    run.resume(0)
    assert run.rates == [(0, 0.125)]
