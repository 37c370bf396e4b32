"""The learner with models of transformers: it learns what our decoder learns, goes on exactly, adapts and publishes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Run, Trainer
from asyncrl.config.algorithm import Algorithm, Grpo, Importance, Kl, Ppo
from asyncrl.config.run import Checkpoint
from asyncrl.config.trainer import Lora
from asyncrl.training import checkpoint
from asyncrl.training.batches import block, pack, share
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.export import likeliest
from asyncrl.training.learner import Learner
from tests.support.tiny_families import tiny_family
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
MANIFEST = TrainingManifest(step=2, samples_trained=0, consumed=())


def _learner(path: Path, backend: Any = "auto", algorithm: Algorithm | None = None, **settings: Any) -> Learner:
    trainer = Trainer(**{"lr": 1e-3, "token_budget": 120} | settings)
    run = Run(trainer=trainer, correction=Importance(reject=()), model=Checkpoint(path=str(path), backend=backend))
    return Learner(path, run if algorithm is None else msgspec.structs.replace(run, algorithm=algorithm))


def _train(learner: Learner, *seeds: int) -> list[float]:
    found: list[float] = []
    for seed in seeds:
        learner.accumulate(make_groups(3, seed))
        found.append(learner.step().loss)
    return found


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.tensors()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_it_learns_what_our_decoder_learns(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    native, through = _learner(tmp_path), _learner(tmp_path, "transformers")
    assert (native.model.packing, through.model.packing) == ("shared", "packed")
    assert _train(native, 0, 1, 2) == pytest.approx(_train(through, 0, 1, 2), abs=1e-5)
    found = _weights(through)
    for name, tensor in native.tensors():
        assert torch.allclose(found[name], tensor, atol=2e-5), name
    prompts = ((1, 2, 3), (4, 5, 6))
    settings = Trainer()
    assert likeliest(through.model, settings, prompts) == pytest.approx(
        likeliest(native.model, settings, prompts), abs=1e-4
    )


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {}),
        ("gpt_oss", {"checkpoint_activations": True}),
        ("mistral", {"lora": Lora(rank=2, targets=("q_proj", "down_proj"))}),
        pytest.param("cohere", {"dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"dtype": "bf16", "optimizer": "adamw_8bit"}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral", {"dtype": "bf16", "lora": Lora(rank=2, targets=("q_proj", "o_proj"))}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_saved_learner_goes_on_to_the_same_weights(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_family(tmp_path / "base", family)
    learner = _learner(tmp_path / "base", **settings)
    before = _weights(learner)
    _train(learner, 0, 1)
    saved = checkpoint.save(learner, tmp_path, MANIFEST, model_path=tmp_path / "base", keep=1)
    resumed = _learner(tmp_path / "base", **settings)
    checkpoint.restore(resumed, saved)
    assert _train(learner, 2, 3) == _train(resumed, 2, 3)
    ours, theirs = _weights(learner), _weights(resumed)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in ours.items())
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    assert loaded.keys() == again.keys()
    assert not all(torch.equal(tensor, again[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("algorithm", [Ppo(critic_warmup_steps=0), Grpo(kl=Kl(coefficient=0.1))], ids=["ppo", "kl"])
def test_a_critic_and_a_reference_are_of_the_same_kind(algorithm: Algorithm, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    native, learner, resumed = (_learner(tmp_path, each, algorithm) for each in ("native", *["transformers"] * 2))
    assert _train(native, 0, 1) == pytest.approx(_train(learner, 0, 1), abs=1e-4)
    checkpoint.restore(resumed, checkpoint.save(learner, tmp_path, MANIFEST, model_path=tmp_path, keep=1))
    assert _train(learner, 1) == _train(resumed, 1)


def test_padded_rows_stay_within_the_budget() -> None:
    blocks = [block(group, [1.0] * 4) for group in make_groups(6)]
    longest = max(len(each.prompt) + len(answer.tokens) - 1 for each in blocks for answer in each.answers)
    for batches in (list(pack(blocks, 100, "padded")), share(blocks, 100, 0, 2, "padded")):
        for batch in batches:
            lengths = list(map(len, batch.rows))
            assert sum(lengths) == len(batch.tokens_T), "no sample shares tokens with another"
            assert max(lengths) * len(lengths) <= max(100, longest)
    slots = [answer.slot for batch in pack(blocks, 100, "padded") for answer in batch.answers]
    assert sorted(slots) == sorted(answer.slot for each in blocks for answer in each.answers)


def test_it_says_how_samples_lie(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asyncrl")
    for family in ("mistral", "qwen3_5_text"):
        tiny_family(tmp_path / family, family)
        _learner(tmp_path / family)
    assert [each.getMessage() for each in caplog.records if each.name.startswith("asyncrl")] == [
        "MistralForCausalLM through transformers, samples packed into rows",
        "Qwen3_5ForCausalLM through transformers, samples in padded rows: packed, they would see each other",
    ]
