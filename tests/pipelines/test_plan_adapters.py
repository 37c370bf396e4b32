"""What `plan` says of a run that publishes adapters alone: few bytes, and a base that engines hold."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.engine import FakeEngine, NativeEngine, VllmEngine
from asyncrl.config.trainer import Lora
from asyncrl.models.config import ModelConfig
from asyncrl.training.memory import parameters
from pipelines.cli import main
from pipelines.plan import estimate
from pipelines.plan.estimate import Needs, needs
from tests.config.test_precision import QWEN3_8B

ATTENTION, MLP = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 12_288


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}


def _needs(engine: Any, precision: Any = "bf16", lora: Lora | None = None, model: dict[str, Any] = QWEN3_8B) -> Needs:
    run = Run(engine=engine, rollout=Rollout(precision=precision), trainer=Trainer(lora=lora or Lora(rank=16)))
    return needs(run, ModelConfig.from_hf(model), 100)


@pytest.mark.parametrize("engine", [NativeEngine(device="cuda"), VllmEngine()])
def test_only_adapters_travel_and_engines_hold_what_they_belong_to(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "has_gpu", lambda: True)
    found, whole = _needs(engine), _needs(engine, lora=Lora())
    factors = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288)
    assert found.published == 4 * 16 * 36 * factors < whole.published / 90
    assert found.engine_base == 2 * 36 * (ATTENTION + MLP)
    assert found.rollout - whole.rollout == found.engine_base
    few = _needs(engine, lora=Lora(rank=8, targets=("q_proj",)))
    assert few.engine_base == 2 * 36 * 4096 * 4096


def test_engines_that_load_whole_layers_hold_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    count = parameters(ModelConfig.from_hf(QWEN3_8B))
    monkeypatch.setattr(estimate, "has_gpu", lambda: True)
    assert _needs(VllmEngine(), "fp8").engine_base == 2 * count
    assert _needs(VllmEngine(), "fp8_kv").engine_base == _needs(NativeEngine(device="cuda"), "fp8").engine_base
    experts, attention = QWEN3_8B | EXPERTS, Lora(rank=16, targets=("q_proj",))
    count_experts = parameters(ModelConfig.from_hf(experts))
    assert _needs(VllmEngine(), lora=attention, model=experts).engine_base == 2 * count_experts
    monkeypatch.setattr(estimate, "has_gpu", lambda: False)
    assert _needs(VllmEngine(), "fp32").engine_base == 4 * count


def test_each_expert_has_adapters_of_its_own() -> None:
    experts = QWEN3_8B | EXPERTS
    factors = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 8 * 3 * (4096 + 768)
    found = _needs(NativeEngine(device="cpu"), "fp32", model=experts)
    assert found.published == 4 * 16 * 36 * factors
    dense = _needs(NativeEngine(device="cpu"), "fp32", model=experts | {"mlp_only_layers": [0, 35]})
    more = 2 * (3 * (4096 + 12_288) - 8 * 3 * (4096 + 768))
    assert dense.published == found.published + 4 * 16 * more


def test_an_engine_that_reads_its_files_again_holds_nothing_more() -> None:
    assert _needs(NativeEngine(device="cpu"), "fp32").engine_base == 0
    assert _needs(FakeEngine()).engine_base == 0
    assert _needs(FakeEngine()).published == _needs(FakeEngine(), lora=Lora()).published, "it gets whole weights"


def test_the_base_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["plan", "engine=native", "engine.device=cuda", "trainer.lora.rank=4", "rollout.precision=bf16"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "published as adapters; longest prompt" in shown
    assert ", base of adapters " in shown
    assert " kB base " in shown
