"""What `plan` says of a GPU that trainer and engines share; the GPU itself is only said to be there."""

import json
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from asyncrl.config import Checkpoint, Rollout, Run, Trainer
from asyncrl.config.drafter import DrafterSettings, DrafterTraining, EagleDrafter, NgramDrafter, NoDrafter
from asyncrl.config.engine import FakeEngine, NativeEngine, VllmEngine
from asyncrl.config.placement import Placement
from asyncrl.config.task import JsonlTask
from asyncrl.config.weights import Weights
from asyncrl.drafting.memory import drafter_memory
from asyncrl.system import devices
from benchmarks.expand import SHAPES
from benchmarks.rollout import QWEN3
from pipelines.cli import main
from pipelines.compose import compose
from pipelines.plan import estimate
from pipelines.plan.estimate import Card, card, model_config, needs
from pipelines.plan.plan import problems
from tests.support.tiny_model import SMOLLM2

COUNT = 134_515_008
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "has_gpu", lambda: True)
    monkeypatch.setattr(estimate, "gpu_memory", lambda: 24 * GIB)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def _run(model: Path, **changes: object) -> Run:
    defaults: dict[str, object] = {
        "model": Checkpoint(path=str(model)),
        "trainer": Trainer(dtype="bf16", token_budget=8192, checkpoint_activations=True, compile="off"),
        "rollout": Rollout(group_size=8, max_tokens=200, precision="bf16"),
        "engine": VllmEngine(memory=0.5),
    }
    return Run(**defaults | changes)  # type: ignore[arg-type]


def test_the_card_by_hand(gpu: None, model: Path) -> None:
    run = _run(model)
    required = needs(run, model_config(run), 100)
    assert required.recomputed == required.layers == 30
    assert required.published == 2 * COUNT
    assert required.optimizer == 16 * COUNT
    # Groups of 100 + 8 x 200 tokens: of each token attention sees 8 x 300 / 1700.
    assert estimate._largest_batch(run, 100) == (8192, 8 * 300 / 1700, 1)
    kept = 8192 * (30 * 4 * 576 + 12 * 576 + 4 * 64)
    head = 2 * (GIB // 196_608) * 196_608 + 4 * 49152 * 576 + 4 * 8192 * 576
    assert required.activations == kept + head
    assert required.training == required.optimizer + required.activations
    trainer = required.training + (600 << 20) + 2 * required.published
    assert card(run, required) == Card(24 * GIB, trainer, 12 * GIB)


def test_ranks_that_share_the_card_are_all_counted(gpu: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "gpu_count", lambda: 2)

    def trainer(run: Run) -> int:
        found = card(run, needs(run, model_config(run), 100))
        assert found is not None
        return found.trainer

    run = _run(model, trainer=Trainer(ranks=3, checkpoint_activations=True))
    both = trainer(msgspec.structs.replace(run, placement=Placement(share_gpu=True)))
    required = needs(run, model_config(run), 100)
    assert both - trainer(run) == required.training + (600 << 20), "two of three ranks on one of two cards"


def test_a_drafter_that_learns_is_counted_where_the_trainer_computes(gpu: None, model: Path) -> None:
    head, training = EagleDrafter(path="head"), DrafterTraining(on=False)

    def found(drafter: DrafterSettings, device: Literal["cpu", "cuda"] = "cuda") -> tuple[int, int]:
        run = _run(model, drafter=drafter, trainer=Trainer(dtype="bf16", device=device, compile="off"))
        required = needs(run, model_config(run), 100)
        on_card = card(run, required)
        assert on_card is not None
        return on_card.trainer, required.host(run)

    memory = drafter_memory(head, model_config(_run(model)))
    for off in (NgramDrafter(), EagleDrafter(path="head", training=training)):
        assert found(off) == found(NoDrafter())
    (card_with, host_with), (card_without, host_without) = found(head), found(NoDrafter())
    assert card_with - card_without == memory.computed + (600 << 20)
    assert host_with - host_without == memory.hidden_states + 2 * memory.published + (300 << 20)
    host = found(head, "cpu")[1] - found(NoDrafter(), "cpu")[1]
    assert host == memory.computed + memory.hidden_states + 2 * memory.published + (300 << 20)


def test_weights_that_go_over_the_card_take_no_shared_memory(gpu: None, model: Path) -> None:
    def shared(**changes: object) -> int:
        run = _run(model, **changes)
        return needs(run, model_config(run), 100).shared_memory(run)

    assert shared() == 0
    assert shared(weights=Weights(transport="cuda_ipc")) == 0
    assert shared(weights=Weights(transport="file")) == 0
    assert shared(weights=Weights(transport="shared_memory")) == 2 * 2 * COUNT
    assert shared(trainer=Trainer(dtype="bf16", device="cpu")) == 2 * 2 * COUNT


def test_a_budget_below_a_group_splits_it(model: Path) -> None:
    run = _run(model, trainer=Trainer(token_budget=500))
    assert estimate._largest_batch(run, 100) == (500, 2 * 300 / 500, 1)
    assert estimate._largest_batch(_run(model, trainer=Trainer(token_budget=150)), 100) == (300, 1.0, 1)


def test_nothing_on_a_gpu_needs_none(gpu: None, model: Path) -> None:
    cpu = _run(model, trainer=Trainer(device="cpu"), engine=FakeEngine())
    assert card(cpu, needs(cpu, model_config(cpu), 100)) is None
    native = _run(model, trainer=Trainer(device="cpu"), engine=NativeEngine(device="auto", memory=0.25))
    assert card(native, needs(native, model_config(native), 100)) == Card(24 * GIB, 0, 6 * GIB)
    both = _run(model, engine=NativeEngine(device="cpu"))
    found = card(both, needs(both, model_config(both), 100))
    assert found is not None
    assert found.engines == 0


def test_the_30b_recipe_by_hand(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200; docs/recipe-30b-a3b.md has these figures."""
    monkeypatch.setattr(estimate, "gpu_memory", lambda: 139 * GIB)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | SHAPES["qwen3-30b-a3b"].settings()))
    run = compose(["experiment=one_gpu_30b_a3b", f"model.path={tmp_path}"])
    required, count = needs(run, model_config(run), 1024), 30_532_122_624
    attention = 48 * 2048 * (4096 + 2 * 512 + 4096)
    experts = 48 * 128 * 3 * 2048 * 768
    assert required.parameters == count
    # A byte for each number of attention and experts, and a float for each block of 128 x 128.
    assert required.engine_weights == 2 * count - (attention + experts) * (1 - 4 / 128**2)
    assert required.engine_base == 2 * attention
    adapters = 48 * 16 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)
    assert required.published == 4 * adapters
    assert required.optimizer == 2 * count + 16 * adapters
    assert required.recomputed == 48
    # The stream before each layer, and the layer that is computed again: 8 experts keep 4 x 768 and 2 x 2048 numbers.
    layer = 2 * 4 * 2048 + 2 * 6 * 2048 + 2 * 8 * (4 * 768 + 2 * 2048) + 2 * (36 + 32) * 128 + 4 * 32 + 8 * 36 * 128
    backward = 2 * 8 * 2 * 2048 + layer + 2 * 2 * 4 * 128
    kept = 48 * 4 * 2048 + 12 * 2048 + 4 * 128
    assert required.activations == pytest.approx(16_384 * (kept + backward), rel=0.01)
    found = card(run, required)
    assert found is not None
    assert [round(part / 1e9, 1) for part in found] == [149.3, 73.5, 68.7, 0.0]
    cache = found.engines - required.engine_weights - required.engine_base - 2 * GIB
    assert cache / (2 * 2 * 48 * 4 * 128) == pytest.approx(341_000, rel=0.001)  # tokens


def test_too_much_for_the_card_is_refused_with_the_settings_to_change(
    gpu: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.plan.plan.longest_prompt", lambda _: 100)
    task = JsonlTask(path=str(model / "config.json"))

    def said(**changes: object) -> list[str]:
        return [problem for problem in problems(_run(model, task=task, **changes)) if "GPU" in problem]

    assert said() == []
    (refused,) = said(engine=VllmEngine(memory=0.9))
    assert "the GPU has 25.8 GB; the trainer needs about 6.22 GB of it and the engines get 23.2 GB" in refused
    assert "lower engine.memory to 0.75" in refused
    assert "trainer.token_budget" in refused
    assert "checkpoint_activations" not in refused
    assert said(engine=VllmEngine(memory=0.74)) == []
    kept = Trainer(dtype="bf16", token_budget=65_536, checkpoint_activations=False)
    (refused,) = said(trainer=kept)
    assert "take a larger GPU" in refused
    assert "set trainer.checkpoint_activations=true" in refused
    (starved,) = said(engine=VllmEngine(memory=0.01))
    assert "an engine gets 258 MB of the GPU, and its weights alone take 269 MB: raise engine.memory" in starved


def test_auto_keeps_activations_that_fit_and_says_so(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    assert main(["plan", "engine=native", "engine.device=auto"]) == 0
    shown = capsys.readouterr().out
    assert "GPU: 25.8 GB; trainer at most about" in shown
    assert "(activations kept)" in shown
    assert "CUDA MPS is off" in shown
    assert "nvidia-cuda-mps-control -d" in shown
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert devices.mps_runs()
    assert main(["plan", "engine=native", "engine.device=auto"]) == 0
    assert "CUDA MPS is on" in capsys.readouterr().out
