"""Adapters on experts: gradients of merged weights, one name per expert on disk, one tensor for all on the way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Importance
from asyncrl.config.trainer import Lora
from asyncrl.engines.native.cpu.decoding import Policy
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import WeightSyncError
from asyncrl.models import lora
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.learner import Learner
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

MANIFEST = TrainingManifest(step=2, samples_trained=0, consumed=())
RECEIVER = Receiver("e", "version 0", "model")
TOKENS = [5, 9, 2, 40, 17, 3, 3, 21]
MIXED: dict[str, Any] = {"mlp_only_layers": [0]}
"""A dense layer, and one of experts."""
ALL = Lora().targets
TARGETS: dict[str, tuple[str, ...]] = {"all": ALL, "some": ("q_proj", "up_proj", "down_proj")}


def _learner(path: Path, *, targets: Any = ALL, **settings: Any) -> Learner:
    trainer = Trainer(lr=1e-2, lora=Lora(rank=4, alpha=8.0, targets=targets), **settings)
    run = Run(trainer=trainer, rollout=Rollout(router_replay="off"), correction=Importance(reject=()))
    return Learner(path, run)


def _train(learner: Learner, steps: int = 2) -> float:
    loss = 0.0
    for seed in range(steps):
        learner.accumulate(make_groups(3, seed))
        loss = learner.step().loss
    return loss


def _hidden(model: Decoder, merged: dict[str, Tensor] | None = None) -> Tensor:
    arguments = torch.tensor(TOKENS), torch.arange(len(TOKENS)), packed_attention([len(TOKENS)])
    return model(*arguments) if merged is None else functional_call(model, merged, arguments)


def _merged(base: Decoder, model: Decoder) -> dict[str, Tensor]:
    """The base with W + s B A in the place of W, by our names, for autograd to look through."""
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for module, _, adapter in model.adapted():
        names = lora.modules(module, adapter)
        down, up = adapter.A.chunk(len(names)), (adapter.scale * adapter.B).chunk(len(names))
        factors |= {f"{name}.weight": pair for name, pair in zip(names, zip(down, up, strict=True), strict=True)}
    found: dict[str, Tensor] = {}
    for own, parts in base.parts():
        rows = base.get_parameter(own).detach().split([part.rows for part in parts])
        found[own] = torch.cat(
            [
                each + factors[part.name][1] @ factors.pop(part.name)[0] if part.name in factors else each
                for part, each in zip(parts, rows, strict=True)
            ]
        )
    assert not factors, "every adapter belongs to a matrix"
    return found


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("changes", [{}, MIXED], ids=["experts", "mixed"])
def test_gradients_are_those_through_merged_weights(changes: dict[str, Any], targets: Any, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe", **changes)
    (model, _), (base, _) = load_model(tmp_path), load_model(tmp_path)
    lora.attach(model, Lora(rank=3, alpha=6.0, targets=targets), seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for index, parameter in enumerate(trained):  # B begins at zero, where A has no gradient
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    found, wanted = _hidden(model), _hidden(base, _merged(base, model))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(each.square().sum(), trained) for each in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


def test_files_have_a_name_for_each_expert_and_none_for_the_router(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "qwen3_moe", **MIXED)
    learner = _learner(tmp_path / "base")
    _train(learner)
    saved = checkpoint.save(learner, tmp_path / "saved", MANIFEST, model_path=tmp_path / "base", keep=1)
    with safe_open(saved / "adapter" / lora.WEIGHTS, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    prefix = "base_model.model.model.layers."
    assert shapes[f"{prefix}1.mlp.experts.7.gate_proj.lora_A.weight"] == (4, 32)
    assert shapes[f"{prefix}1.mlp.experts.0.down_proj.lora_B.weight"] == (32, 4)
    assert shapes[f"{prefix}0.mlp.up_proj.lora_B.weight"] == (64, 4)
    assert not any("mlp.gate." in name for name in shapes)
    assert len(shapes) == 2 * (4 + 3 + 4 + 3 * 8)
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
        torch.testing.assert_close(learner.model.logits(_hidden(learner.model)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # peft packs experts, as transformers
def test_the_saved_adapter_is_the_same_model_under_peft(tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path / "base", "qwen3_moe")
    learner = _learner(tmp_path / "base")
    _train(learner)
    saved = checkpoint.save(learner, tmp_path / "saved", MANIFEST, model_path=tmp_path / "base", keep=1)
    with torch.no_grad():
        before = theirs(torch.tensor([TOKENS])).logits[0]
        expected = PeftModel.from_pretrained(theirs, saved / "adapter")(torch.tensor([TOKENS])).logits[0]
        assert not torch.allclose(before, expected, atol=1e-2)
        torch.testing.assert_close(learner.model.logits(_hidden(learner.model)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "qwen3_moe", **MIXED)
    first, second = (_learner(tmp_path / "base", dtype=dtype, targets=TARGETS["some"]) for _ in range(2))
    before = {name: parameter.detach().clone() for name, parameter in first.model.named_parameters()}
    _train(first)
    moved = {name for name, p in first.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "adapters" in name}
    saved = checkpoint.save(first, tmp_path / "saved", MANIFEST, model_path=tmp_path / "base", keep=1)
    checkpoint.restore(second, saved)
    assert _train(first) == _train(second)
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{}, MIXED], ids=["experts", "mixed"])
def test_an_engine_that_is_sent_adapters_alone_holds_the_merged_weights(changes: Any, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe", **changes)
    learner, engine, other = (
        _learner(tmp_path),
        Policy(tmp_path, torch.float32, 64),
        Policy(tmp_path, torch.float32, 64),
    )
    _train(learner)
    writers = [
        SharedMemoryWriter(learner.source(torch.float32, adapters_only=only), prefix="t") for only in (True, False)
    ]
    manifest, whole = (writer.publish(1) for writer in writers)
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    if changes:
        assert shapes["model.layers.1.mlp.experts.*.gate_proj.lora_A.weight"] == (1, 8, 4, 32)
        assert shapes["model.layers.0.mlp.down_proj.lora_B.weight"] == (1, 32, 4)
    else:
        assert shapes["model.layers.*.mlp.experts.*.down_proj.lora_B.weight"] == (2, 8, 32, 4)
        assert len(shapes) == 14
    assert engine.load(manifest, RECEIVER) == manifest.digest
    other.load(whole, RECEIVER)
    for one, same in zip(engine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, same)
    for writer in writers:
        writer.close()


def test_adapters_of_other_experts_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "a", "qwen3_moe")
    tiny_checkpoint(tmp_path / "b", "qwen3_moe", num_experts=4)
    writer = SharedMemoryWriter(_learner(tmp_path / "b").source(torch.float32, adapters_only=True), prefix="t")
    with pytest.raises(WeightSyncError, match=r"mlp\.experts\.\*\.down_proj\.weight \(2, 4, 32, 32\)"):
        Policy(tmp_path / "a", torch.float32, 64).load(writer.publish(1), RECEIVER)
    writer.close()
