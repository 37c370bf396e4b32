"""What vLLM's worker keeps of a checkpoint for the adapters of later versions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import needs

pytest.importorskip("vllm", reason=needs.VLLM)

from vllm.config.load import LoadConfig

from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.vllm import loader
from asyncrl.engines.vllm.loader import Base, CheckpointLoader, base_of
from asyncrl.engines.vllm.options import ADAPTED, CHECKPOINTS, LOADER, engine_args
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from tests.support.tiny_model import tiny_checkpoint


def loaded(path: Path, *, runner: str = "generate", adapted: tuple[str, ...] = ("q_proj", "down_proj")) -> Base:
    made = CheckpointLoader(LoadConfig(load_format=LOADER, model_loader_extra_config={ADAPTED: list(adapted)}))
    config: Any = SimpleNamespace(
        model=str(path),
        revision=None,
        hf_config=SimpleNamespace(),
        quantization=None,
        runner_type=runner,
        dtype=torch.bfloat16,
    )
    model = nn.Linear(1, 1)
    assert {name for name, _ in made.get_all_weights(config, model)} == {n for n, _ in hf_tensors(load_model(path)[0])}
    return base_of(model)


def test_only_adapted_matrices_are_kept_where_they_are_overwritten_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path)
    names = {f"model.layers.{i}.{part}_proj.weight" for i in range(2) for part in ("self_attn.q", "mlp.down")}
    shapes = {
        "model.layers.*.self_attn.q_proj.weight": (2, 128, 32),
        "model.layers.*.mlp.down_proj.weight": (2, 32, 64),
    }
    everything = loaded(tmp_path)
    assert everything.adapted == shapes
    assert everything.tensors.keys() == {name for name, _ in hf_tensors(load_model(tmp_path)[0])}
    monkeypatch.setattr(loader, "in_place", lambda *_: True)
    few = loaded(tmp_path)
    assert few.adapted == shapes
    assert few.tensors.keys() == names
    for name, tensor in hf_tensors(load_model(tmp_path)[0]):
        assert name not in names or torch.equal(few.tensors[name], tensor.bfloat16())


def test_a_drafting_head_and_a_run_without_adapters_keep_nothing(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    assert loaded(tmp_path, runner="draft") == Base({}, {})
    assert loaded(tmp_path, adapted=()) == Base({}, {})
    plain = engine_args(tmp_path, VllmEngine(), NoDrafter(), "bf16")
    assert (plain.load_format, plain.model_loader_extra_config) == (CHECKPOINTS, {})
    with_adapters = engine_args(tmp_path, VllmEngine(), NoDrafter(), "bf16", adapted=("q_proj",))
    assert (with_adapters.load_format, with_adapters.model_loader_extra_config) == (LOADER, {ADAPTED: ["q_proj"]})
