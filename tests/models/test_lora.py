"""Adapters: the same numbers as peft's, only they learn, they come back from checkpoints, and engines merge them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from asyncrl.config import Run, Trainer, load
from asyncrl.config.algorithm import Importance
from asyncrl.config.trainer import Lora
from asyncrl.engines.native.cpu.decoding import Policy
from asyncrl.engines.native.weight_loading import Receiver
from asyncrl.errors import CheckpointError, ConfigError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.decoder import Decoder
from asyncrl.models.packed import packed_attention
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.learner import Learner
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

LORA = Lora(rank=4, alpha=8.0)
TOKENS = [5, 9, 2, 40, 17, 3, 3, 21]
MANIFEST = TrainingManifest(step=2, samples_trained=0, consumed=())
RECEIVER = Receiver("e", "version 0", "model")


def _learner(path: Path, *, lora: Lora = LORA, **settings: Any) -> Learner:
    trainer = Trainer(lr=1e-2, lora=lora, **settings)
    return Learner(path, Run(trainer=trainer, correction=Importance(reject=())))


def _train(learner: Learner, steps: int = 2) -> float:
    for seed in range(steps):
        learner.accumulate(make_groups(3, seed))
        loss = learner.step().loss
    return loss


@torch.no_grad()
def _logits(model: Decoder) -> torch.Tensor:
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    return model.logits(model(tokens, positions, packed_attention([len(TOKENS)])))


@pytest.mark.parametrize("targets", [Lora().targets, ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
def test_the_saved_adapter_is_the_same_model_under_peft(tmp_path: Path, targets: Any) -> None:
    theirs = tiny_checkpoint(tmp_path / "base", "qwen3")
    learner = _learner(tmp_path / "base", lora=Lora(rank=4, alpha=8.0, targets=targets))
    before = _logits(learner.model)
    assert torch.allclose(before, theirs(torch.tensor([TOKENS])).logits[0], atol=1e-4)  # B begins at zero
    _train(learner)
    saved = checkpoint.save(learner, tmp_path / "saved", MANIFEST, model_path=tmp_path / "base", keep=1)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(theirs, saved / "adapter")(torch.tensor([TOKENS])).logits[0]
    assert not torch.allclose(before, expected, atol=1e-2)
    assert torch.allclose(_logits(learner.model), expected, atol=1e-4)
    assert torch.allclose(_logits(load_model(saved)[0]), expected, atol=1e-4)  # merged, for those without peft


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_adapters_learn(tmp_path: Path, dtype: str) -> None:
    tiny_checkpoint(tmp_path, "llama")
    learner = _learner(tmp_path, dtype=dtype)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    _train(learner)
    moved = {name for name, p in learner.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "adapters" in name}
    assert len(learner.optimizer.state) == len(moved) == 2 * 2 * 7


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "base", "qwen2")
    first, second = (_learner(tmp_path / "base") for _ in range(2))
    _train(first)
    saved = checkpoint.save(first, tmp_path / "saved", MANIFEST, model_path=tmp_path / "base", keep=1)
    assert checkpoint.restore(second, saved).step == MANIFEST.step
    assert _train(first) == _train(second)
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"was written with trainer\.lora\.rank"):
        checkpoint.restore(_learner(tmp_path / "base", lora=Lora()), saved)


def test_an_engine_that_is_sent_adapters_alone_holds_the_merged_weights(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    learner = _learner(tmp_path)
    engines = [Policy(tmp_path, torch.float32, 64) for _ in range(2)]
    sizes: list[list[int]] = [[], []]
    for version in (1, 2):
        _train(learner)
        for index, engine in enumerate(engines):
            writer = SharedMemoryWriter(learner.source(torch.float32, adapters_only=bool(index)), prefix="test")
            manifest = writer.publish(version)
            assert engine.load(manifest, RECEIVER) == manifest.digest
            sizes[index].append(manifest.total_bytes)
            writer.close()
        for whole, merged in zip(*(engine.model.parameters() for engine in engines), strict=True):
            assert torch.equal(whole, merged)
    assert 4 * sizes[1][0] < sizes[0][0]


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "a", "qwen3")
    tiny_checkpoint(tmp_path / "b", "qwen3", hidden_size=64)
    writer = SharedMemoryWriter(_learner(tmp_path / "b").source(torch.float32, adapters_only=True), prefix="test")
    engine = Policy(tmp_path / "a", torch.float32, 64)
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(WeightSyncError, match="belong to other matrices"):
        engine.load(writer.publish(1), RECEIVER)
    assert all(torch.equal(p, q) for p, q in zip(engine.model.parameters(), before, strict=True))
    writer.close()


def test_settings_that_train_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets=\[\]"):
        load({"trainer": {"lora": {"rank": 4, "targets": []}}})
    tiny_checkpoint(tmp_path, "qwen3")
    with pytest.raises(
        ConfigError, match=r"targets names lm_head, and qwen3 has no such linear layers; .* some of down"
    ):
        _learner(tmp_path, lora=Lora(rank=4, targets=("lm_head",)))
