"""What `engine=auto` takes, on machines with and without a GPU and vLLM."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Checkpoint, Rollout, Run
from asyncrl.config.drafter import Adaptive, DrafterTraining, EagleDrafter, NgramDrafter, NoDrafter
from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.config.precision import PRECISIONS
from asyncrl.engines import registry
from asyncrl.engines.registry import Choice, choose_engine
from pipelines.compose import compose
from pipelines.pipeline import Pipeline
from tests.support.families import family_config
from tests.support.tiny_model import tiny_checkpoint, tiny_config

BF16 = Rollout(precision="bf16")
KNOWN = "our decoder knows the model, and one GPU holds it"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    family_config("gemma3").save_pretrained(directory / "gemma3")
    tiny_checkpoint(directory / "qwen3", "qwen3")
    tiny_config("qwen3_moe").save_pretrained(directory / "experts")
    return directory


def machine(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, vllm: bool, memory: int = 80 << 30) -> None:
    monkeypatch.setattr(registry, "has_gpu", lambda: gpu)
    monkeypatch.setattr(registry, "runs_vllm", lambda: gpu and vllm)
    monkeypatch.setattr(registry, "gpu_memory", lambda: memory if gpu else None)


def choice(directory: Path, rollout: Rollout = BF16, **asked: object) -> Choice:
    return choose_engine(
        {"type": "checkpoint", "path": str(directory)}, {"type": "auto", **asked}, rollout, NoDrafter()
    )


def test_without_a_gpu(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False, vllm=True)
    assert choice(models / "qwen3", max_batch=7) == ({"type": "native", "max_batch": 7}, "no GPU was found")
    assert choice(models / "nothing").settings == {"type": "native"}
    assert choose_engine({"type": "warm_start"}, {}, BF16, NoDrafter()).settings == {"type": "native"}
    assert choice(models / "gemma3") == ({"type": "transformers"}, "our decoder does not know the model")


def test_with_a_gpu(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, vllm=True)
    assert choice(models / "qwen3") == ({"type": "native", "device": "cuda"}, KNOWN)
    assert choice(models / "qwen3", device="cpu").settings == {"type": "native", "device": "cpu"}
    assert choose_engine({"type": "warm_start"}, {}, BF16, NoDrafter()).settings == {"type": "native", "device": "cuda"}
    assert choice(models / "gemma3").settings == {"type": "vllm"}
    assert choice(models / "experts") == ({"type": "vllm"}, "the model has experts, with which vLLM is faster")
    wanted = choice(models / "qwen3", tensor_parallel=2)
    assert wanted == ({"type": "vllm", "tensor_parallel": 2}, "engine.tensor_parallel is a setting of vLLM")


def test_a_model_that_one_gpu_does_not_hold(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10**6 numbers of 2 bytes into 0.8 of half the card."""
    monkeypatch.setattr(registry, "tensor_sizes", lambda _: {"a": 400_000, "b": 600_000})
    for memory, kind in ((5_000_001, "native"), (4_999_999, "vllm")):
        machine(monkeypatch, gpu=True, vllm=True, memory=memory)
        assert choice(models / "qwen3", memory=0.5).settings["type"] == kind


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 2)])
def test_a_number_takes_what_it_does_in_the_rollouts_precision(
    models: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, item: int
) -> None:
    monkeypatch.setattr(registry, "tensor_sizes", lambda _: {"a": 10**6})
    for memory, kind in ((item * 10**6 * 5 // 2 + 1, "native"), (item * 10**6 * 5 // 2 - 1, "vllm")):
        machine(monkeypatch, gpu=True, vllm=True, memory=memory)
        assert choice(models / "qwen3", Rollout(precision=precision), memory=0.5).settings["type"] == kind


def test_experts_in_fp8_are_for_our_engine(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes no updates of them, but has keys and values in FP8."""
    machine(monkeypatch, gpu=True, vllm=True)
    found = {p: choice(models / "experts", Rollout(precision=p)).settings["type"] for p in PRECISIONS}
    assert found == {"fp32": "vllm", "bf16": "vllm", "fp8": "native", "fp8_kv": "vllm", "fp8_full": "native"}
    overrides = ["engine=auto", "model=checkpoint", f"model.path={models / 'experts'}", "rollout.precision=fp8"]
    assert isinstance(compose(overrides).engine, NativeEngine)
    own = Pipeline(model=str(models / "experts"), prompts=["1 + 1 ="], reward=len, rollout={"precision": "fp8"})
    assert isinstance(own.config.engine, NativeEngine)


def test_what_drafters_need_of_an_engine(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, vllm=True)
    model = {"type": "checkpoint", "path": str(models / "qwen3")}
    trees = NgramDrafter(tokens=2, top_k=2, verify=4, adaptive=Adaptive(on=False))
    found = choose_engine(model, {"type": "auto"}, BF16, trees)
    assert found == ({"type": "native"}, "drafter=ngram so set needs our engine on a CPU")
    hidden = EagleDrafter(training=DrafterTraining(source="rollout"))
    assert choose_engine(model, {"type": "auto"}, BF16, hidden).settings == {"type": "native", "device": "cuda"}
    assert choose_engine(model, {"type": "auto"}, BF16, EagleDrafter()).settings["device"] == "cuda"


def test_a_gpu_without_vllm(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, vllm=False)
    assert choice(models / "qwen3").settings == {"type": "native", "device": "cuda"}
    assert choice(models / "experts").settings == {"type": "native", "device": "cuda"}
    assert choice(models / "gemma3").settings == {"type": "transformers"}


def test_plan_says_which_and_why(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=True, vllm=True)
    model = Checkpoint(str(models / "qwen3"))
    same = registry.why_engine(Run(model=model, engine=NativeEngine(device="cuda")))
    assert same == f"engine: native on a GPU, as engine=auto takes native here, because {KNOWN}"
    other = registry.why_engine(Run(model=model, engine=VllmEngine()))
    assert other == f"engine: vllm; engine=auto takes native here, because {KNOWN}"
