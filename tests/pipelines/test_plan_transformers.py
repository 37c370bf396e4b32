"""What `plan` and `doctor` say of a model that is trained through transformers, and what they refuse."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.config import Run, Trainer
from asyncrl.config.run import Checkpoint
from asyncrl.models.config import read_config
from asyncrl.models.files import WEIGHTS
from asyncrl.training.memory import parameters, training_memory
from pipelines.cli import main
from pipelines.plan.estimate import Batch
from tests.support.tiny_chat import save_chat_tokenizer
from tests.support.tiny_families import tiny_family
from tests.support.tiny_model import tiny_checkpoint

SHAPE = {"vocab_size": 268, "max_position_embeddings": 1024, "eos_token_id": 257}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("mistral", "qwen3_next", "phi3"):
        tiny_family(folder / family, family, **SHAPE)
        save_chat_tokenizer(folder / family)
    tiny_checkpoint(folder / "qwen3_moe", "qwen3_moe", **SHAPE)
    save_chat_tokenizer(folder / "qwen3_moe")
    return folder


def _plan(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, *settings: str) -> tuple[int, str]:
    words = ["model=checkpoint", f"model.path={model}", f"root={tmp_path}", "rollout.max_tokens=32", *settings]
    code = main(["plan", "experiment=quickstart", *words])
    found = capsys.readouterr()
    return code, " ".join((found.out + found.err).split())


def test_it_says_whose_code_trains_the_model(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _plan(capsys, models / "mistral", tmp_path, "engine=vllm")
    assert code == 0, said
    assert "trained with MistralForCausalLM of transformers; samples are packed if a trial" in said
    assert "its memory is an estimate" in said
    code, said = _plan(capsys, models / "qwen3_moe", tmp_path, "model.backend=transformers")
    assert code == 0, said
    assert "Qwen3MoeForCausalLM of transformers" in said
    assert main(["doctor", "--json", "--model", str(models / "qwen3_next")]) in (0, 1)
    verdict = json.loads(capsys.readouterr().out)[-1]
    assert (verdict["check"], verdict["level"]) == ("model", "ok")
    assert (
        "Qwen3NextForCausalLM of transformers; samples are padded rows; not with it: router replay" in verdict["found"]
    )


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (
            "mistral",
            "engine=native",
            "engine=native computes with our own decoder, which does not know model_type=mistral",
        ),
        (
            "mistral",
            "engine=vllm rollout.precision=fp8",
            "rollout.precision=fp8: FP8 is for models that our own decoder",
        ),
        ("mistral", "engine=vllm drafter=eagle3", "which does not know model_type=mistral: use drafter=none"),
        ("mistral", "engine=vllm model.backend=native", "model_type='mistral' is not supported; use one of llama"),
        (
            "phi3",
            "engine=vllm trainer.lora.rank=2",
            "targets names q_proj, k_proj, v_proj, gate_proj, up_proj, and the",
        ),
        (
            "qwen3_moe",
            "model.backend=transformers rollout.router_replay=on",
            "set rollout.router_replay=off, or model.backend=native",
        ),
        (
            "qwen3_moe",
            "model.backend=transformers algorithm.router_aux_loss=0.1",
            "routers of a model of transformers are not observed",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    model: str, settings: str, said: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = _plan(capsys, models / model, tmp_path, *settings.split())
    assert code == 2
    assert said in found


def test_frequencies_that_depend_on_the_longest_sample_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16, **factors}
    tiny_family(tmp_path / "model", "phi3", rope_parameters=rope, original_max_position_embeddings=16, **SHAPE)
    save_chat_tokenizer(tmp_path / "model")
    code, said = _plan(capsys, tmp_path / "model", tmp_path, "engine=vllm")
    assert (code, "rope_type=longrope stretches every sample of a batch" in said) == (2, True)


def test_memory_follows_from_the_files(models: Path) -> None:
    model, moe = read_config(models / "mistral", "auto"), models / "qwen3_moe"
    assert parameters(model) == sum(tensor.numel() for tensor in load_file(models / "mistral" / WEIGHTS).values())
    own, through = read_config(moe), read_config(moe, "transformers")
    assert parameters(own) == parameters(through)
    assert parameters(own.without_output()) == parameters(through.without_output())
    run = Run(trainer=Trainer(), model=Checkpoint(path=str(moe), backend="transformers"))
    ours, theirs = (training_memory(run, each, Batch(100)) for each in (own, through))
    assert ours.weights == theirs.weights
    assert ours.activations < theirs.activations < 3 * ours.activations
