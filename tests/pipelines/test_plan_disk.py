"""What `plan` says of the disk: how many checkpoints there are at a time, and what really saved ones weigh."""

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from asyncrl.config import Checkpoints, Run, Trainer
from asyncrl.config.algorithm import Algorithm, Grpo, Ppo
from asyncrl.config.trainer import Lora
from asyncrl.models.config import read_config
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.distributed.ranks import Ranks
from asyncrl.training.learner import Learner
from pipelines.cli import main
from pipelines.plan.disk import checkpoint_bytes, most_checkpoints
from pipelines.plan.estimate import model_config, needs
from pipelines.plan.plan import problems
from tests.support.rank_processes import play
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 512}
ADAPTERS = Lora(rank=8, targets=("q_proj", "down_proj"))
CLOSE = 0.02
"""Headers, JSON files and the optimizer's step counts are not estimated."""


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        (Checkpoints(), 3),
        (Checkpoints(every=20, keep=1), 2),
        (Checkpoints(every=20, keep=9), 5),
        (Checkpoints(every=30, keep=9), 4),
        (Checkpoints(every=30, last=False, keep=9), 3),
        (Checkpoints(every=100), 1),
        (Checkpoints(every=101), 1),
        (Checkpoints(every=101, last=False), 0),
        (Checkpoints(every=0), 1),
        (Checkpoints(every=0, last=False), 0),
    ],
)
def test_checkpoints_on_disk_at_one_time(settings: Checkpoints, most: int) -> None:
    assert most_checkpoints(Run(steps=100, checkpoint=settings)) == most


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "tied", "qwen2", **SHAPE)
    tiny_checkpoint(folder / "untied", "qwen3", **SHAPE)
    return folder


def _saved_bytes(model: Path, run: Run, folder: Path, ranks: Ranks | None = None) -> int:
    learner = Learner(model, run, ranks)
    learner.accumulate(make_groups(2))
    learner.step()
    manifest = TrainingManifest(step=1, samples_trained=8, consumed=((0, 1),))
    saved = checkpoint.save(learner, folder, manifest, model_path=model, keep=1)
    return sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
@pytest.mark.parametrize("algorithm", [Grpo(), Ppo()], ids=["policy", "critic"])
@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(),
        Trainer(lora=ADAPTERS),
        pytest.param(Trainer(lora=ADAPTERS, dtype="bf16"), marks=pytest.mark.slow),  # many seconds on a CPU without it
    ],
)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_saved_checkpoint_has_the_estimated_size(
    models: Path, tmp_path: Path, name: str, trainer: Trainer, algorithm: Algorithm
) -> None:
    run = Run(trainer=trainer, algorithm=algorithm)
    estimated = checkpoint_bytes(run, read_config(models / name))
    assert estimated == pytest.approx(_saved_bytes(models / name, run, tmp_path), rel=CLOSE)


def two_ranks(ranks: Ranks, folder: Path) -> None:
    for index, trainer in enumerate((Trainer(ranks=2), Trainer(ranks=2, lora=ADAPTERS))):
        run = Run(trainer=trainer, algorithm=Ppo())
        saved = _saved_bytes(folder / "untied", run, folder / f"saved-{index}", ranks)
        assert checkpoint_bytes(run, read_config(folder / "untied")) == pytest.approx(saved, rel=CLOSE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_save_as_much_as_one(models: Path) -> None:
    assert "".join(play(2, (two_ranks,), models)["two_ranks"]) == ""


def test_lora_saves_no_optimizer_of_the_frozen_weights(models: Path) -> None:
    model = read_config(models / "untied")
    whole, adapted = (checkpoint_bytes(Run(trainer=each), model) for each in (Trainer(), Trainer(lora=ADAPTERS)))
    assert adapted < 0.4 * whole


class _Usage(NamedTuple):
    free: int


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run, and a disk that has room for one step of trajectories and two and a half checkpoints."""
    monkeypatch.chdir(tmp_path)
    run = Run(cluster="10.0.0.1:6379", steps=100)
    monkeypatch.setattr("pipelines.plan.plan.longest_prompt", lambda _: 100)
    required = needs(run, model_config(run), 100)
    free = required.trajectories + required.checkpoint * 5 // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free))
    return run


def _said(run: Run, **changes: object) -> list[str]:
    settings = msgspec.structs.replace(run, checkpoint=Checkpoints(**changes))  # type: ignore[arg-type]
    return [problem for problem in problems(settings) if problem.startswith("root=")]


def test_too_small_a_disk_is_refused_with_the_settings_that_fit(
    small_disk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (refused,) = _said(small_disk)
    assert refused.startswith("root=runs has ")
    assert "needs 10.9 MB for checkpoints (3 x 3.64 MB: checkpoint.keep=2, and one being written) and " in refused
    assert "set checkpoint.keep=1, or set checkpoint.every=0 checkpoint.last=false to save none" in refused
    (refused,) = _said(small_disk, keep=9)
    assert "(5 x 3.64 MB: steps=100 checkpoint.every=20 checkpoint.last=true)" in refused
    assert _said(small_disk, keep=1) == []
    assert _said(small_disk, every=0) == []
    assert _said(small_disk, every=0, last=False) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(6_000_000))
    (refused,) = _said(small_disk, last=False)
    assert "set checkpoint.every=0 checkpoint.last=true to save the last step only" in refused
    assert _said(small_disk, every=0) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1000))
    (refused,) = _said(small_disk, every=0)
    assert "last step only" not in refused
    (refused,) = _said(small_disk, every=0, last=False)
    assert refused.endswith("for one step of trajectories: choose another root=")


def test_plan_prints_how_many_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["plan"]) == 0
    assert "on disk at most 10.9 MB of checkpoints (3 x 3.64 MB) and at most " in capsys.readouterr().out
    assert main(["plan", "checkpoint.every=0", "checkpoint.last=false"]) == 0
    assert "on disk no checkpoints and at most " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keep", "buffer", "warned"), [(1, "steps:100", True), (2, "steps:100", False), (1, "all", False)]
)
def test_one_checkpoint_without_the_steps_before_it_is_warned_of(
    keep: int, buffer: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"checkpoint.keep={keep}", f"buffer.keep={buffer}", "cluster=inprocess"]
    assert main(["plan", "experiment=quickstart", *settings]) == 0
    assert ("if that one checkpoint is damaged, the run cannot go on" in capsys.readouterr().out) == warned


def test_a_name_that_files_have_no_room_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=quickstart", f"name={'n' * 64}", "cluster=inprocess"]) == 0
    assert main(["plan", "experiment=quickstart", f"name='{'n' * 62}äöüß'", "cluster=inprocess"]) == 2
    said = "has 70 bytes; files of a run name it with 64 at most, so choose a shorter one"
    assert said in capsys.readouterr().err
