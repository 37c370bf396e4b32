"""One word turns FP8 on; what cannot work is refused with the reason."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.engine import NativeEngine, VllmEngine
from asyncrl.config.precision import (
    Fp8,
    check_precision,
    gathered_in,
    model_problems,
    numerics,
    served_precision,
    without_fp8,
)
from asyncrl.config.run import Checkpoint, Run, load
from asyncrl.data.tokenizer import save_character_tokenizer
from asyncrl.engines.vllm import build, environment
from asyncrl.errors import ConfigError
from asyncrl.models.config import ModelConfig
from asyncrl.precision.memory import footprint, footprints
from asyncrl.tasks.chains import CHARACTERS, END
from asyncrl.training.memory import parameters
from asyncrl.types import Fp8Version, WeightManifest
from asyncrl.weights import probe
from benchmarks.fp8 import ARMS, ON
from pipelines.compose import compose
from pipelines.plan import estimate, plan, render
from tests.support.tiny_model import tiny_checkpoint

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def _run(precision: str, **rollout: Any) -> Run:
    return load({"rollout": {"precision": precision} | rollout})


@pytest.mark.parametrize(
    ("precision", "weights", "kv"), [("fp8", True, False), ("fp8_kv", False, True), ("fp8_full", True, True)]
)
def test_one_word(precision: str, weights: bool, kv: bool) -> None:
    run = _run(precision)
    found = numerics(run.rollout.precision, run.rollout.fp8)
    assert found is not None
    assert (found.weights, found.kv) == (weights, kv)
    assert NativeEngine().carrier(precision) == "fp32"
    assert VllmEngine().carrier(precision) == "bf16"
    assert probe.tolerance(run) == probe.FP8_TOLERANCE


def test_other_precisions_have_none_of_it() -> None:
    assert numerics("fp32", Fp8()) is None
    assert numerics("bf16", Fp8()) is None
    assert (VllmEngine().carrier("fp32"), NativeEngine().carrier("bf16")) == ("fp32", "bf16")


def test_what_is_not_in_fp8_is_bf16_on_a_gpu_and_fp32_in_the_simulation() -> None:
    assert NativeEngine(device="cuda").carrier("fp8") == VllmEngine().carrier("fp8") == "bf16"
    assert NativeEngine(device="cpu").carrier("fp8") == NativeEngine(device="cuda").carrier("fp32") == "fp32"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_the_trainer_quantizes_are_the_numbers_it_computes_with(dtype: str) -> None:
    run = load(
        {"rollout": {"precision": "fp8"}, "engine": {"type": "native", "device": "cuda"}, "trainer": {"dtype": dtype}}
    )
    assert gathered_in(run, quantizes=True) == dtype
    assert gathered_in(run, quantizes=False) == "bf16"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"rollout": {"precision": "fp8"}, "engine": {"type": "native", "device": "auto"}},
            "use engine.device=cuda or engine.device=cpu instead of auto",
        ),
        (
            {
                "rollout": {"precision": "fp8"},
                "engine": {"type": "native", "device": "cuda"},
                "sentinel": {"on_fp8": "fall_back"},
            },
            "engine=native on a GPU cannot leave FP8 while it runs; use sentinel.on_fp8=restart or stop",
        ),
        (
            {"rollout": {"precision": "fp8_kv"}, "engine": {"type": "vllm", "attention": "FLASHINFER"}},
            "new ones do not reach them; use rollout.kv_scales=engine, or another engine.attention",
        ),
        (
            {"rollout": {"precision": "fp8_kv"}, "engine": {"type": "vllm", "quantization": "fp8"}},
            "rollout.precision=fp8_kv has not; use rollout.precision=fp8_full, or engine.quantization=none",
        ),
        (
            {"rollout": {"precision": "bf16"}, "engine": {"type": "vllm", "quantization": "fp8_per_block"}},
            "rollout.precision=bf16 has not; use rollout.precision=fp8, or engine.quantization=none",
        ),
        (
            {"rollout": {"precision": "fp8"}, "engine": {"type": "vllm", "kv_dtype": "fp8"}},
            "rollout.precision=fp8 has not; use rollout.precision=fp8_full, or engine.kv_dtype=auto",
        ),
        (
            {"rollout": {"precision": "fp8", "fp8": {"power_of_two": True}}, "engine": {"type": "vllm"}},
            "vLLM chooses scales by itself; use rollout.fp8.power_of_two=false, or engine=native",
        ),
        (
            {"rollout": {"precision": "fp8"}, "engine": {"type": "vllm"}, "sentinel": {"on_fp8": "fall_back"}},
            "engine=vllm cannot leave FP8 while it runs; use sentinel.on_fp8=restart or stop",
        ),
        ({"rollout": {"precision": "fp4"}}, "use one of bf16, fp32, fp8, fp8_full, fp8_kv"),
        ({"rollout": {"fp8": {"keep_frist": 1}}}, "unknown key rollout.fp8.keep_frist"),
    ],
)
def test_refusals_name_the_way_out(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert said in str(caught.value)


@pytest.mark.parametrize("precision", ["fp8_kv", "fp8_full"])
def test_keys_in_fp8_need_qk_norm(precision: str) -> None:
    (said,) = model_problems(_run(precision), layers=4, qk_norm=False)
    assert said.startswith(f"rollout.precision={precision}: keys and values in FP8 need a model with QK-norm")
    assert not list(model_problems(_run(precision), layers=4, qk_norm=True))
    allowed = _run(precision, fp8={"allow_kv_without_qk_norm": True})
    assert not list(model_problems(allowed, layers=4, qk_norm=False))
    assert not list(model_problems(_run("fp8"), layers=4, qk_norm=False))


def test_keeping_every_layer_is_no_fp8() -> None:
    (said,) = model_problems(_run("fp8", fp8={"keep_first": 1, "keep_last": 1}), layers=2, qk_norm=True)
    assert "keep all 2 layers" in said


def test_memory_of_an_8b_model() -> None:
    """Weights of the projections halve but for their scales, and so do keys and values."""
    model = ModelConfig.from_hf(QWEN3_8B)
    count = parameters(model)
    by_name = {found.precision: found for found in footprints(model, count, Fp8())}
    assert by_name["fp32"].weights == 4 * count
    assert by_name["bf16"].kv_token == 2 * 2 * 36 * 8 * 128
    assert by_name["fp8_kv"] == ("fp8_kv", 2 * count, 2 * 36 * 8 * 128, 0)
    projections = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12_288)
    assert by_name["fp8"].weights == 2 * count - projections + 4 * projections // 128**2
    memory = 60 * 10**9
    assert by_name["fp8_full"].tokens(memory) > 2 * by_name["bf16"].tokens(memory)
    assert footprint(model, count, "fp8", Fp8(keep_first=36)).weights == 2 * count


def test_an_answer_carries_the_precision_that_it_was_sampled_in() -> None:
    run = Run(rollout=_run("fp8_full").rollout, model=Checkpoint("somewhere"))
    plain = WeightManifest(version=3, tensors=(), total_bytes=0, digest="", location="")
    quantized = WeightManifest(version=3, tensors=(), total_bytes=0, digest="", location="", fp8=Fp8Version())
    assert served_precision(run, None) == "fp8_full"
    assert served_precision(run, quantized) == "fp8_full"
    assert served_precision(run, plain) == "fp32"
    assert served_precision(Run(rollout=_run("bf16").rollout), plain) == "bf16"


@pytest.mark.parametrize(
    ("precision", "weights", "kv"),
    [("bf16", "none", "auto"), ("fp8", "fp8", "auto"), ("fp8_kv", "none", "fp8"), ("fp8_full", "fp8", "fp8")],
)
def test_vllm_is_told_in_its_own_words(precision: str, weights: str, kv: str) -> None:
    found = VllmEngine().in_precision(precision)
    assert (found.quantization, found.kv_dtype) == (weights, kv)
    assert VllmEngine(kv_dtype="fp8").in_precision(precision).kv_dtype == "fp8"
    assert VllmEngine(quantization="fp8_per_block").in_precision(precision).quantization == "fp8_per_block"


@pytest.mark.parametrize("precision", ["fp8", "fp8_kv", "fp8_full"])
def test_one_word_is_enough_for_vllm(precision: str) -> None:
    run = load({"rollout": {"precision": precision}, "engine": {"type": "vllm"}})
    assert not run.engine.travels_in_fp8
    assert not list(model_problems(run, layers=4, qk_norm=True, joined=(192, 64, 200)))


@pytest.mark.parametrize("engine", [{}, {"quantization": "fp8_per_block", "kv_dtype": "fp8"}])
def test_a_run_that_leaves_fp8_leaves_all_of_it(engine: dict[str, str]) -> None:
    run = without_fp8(load({"rollout": {"precision": "fp8_full"}, "engine": {"type": "vllm"} | engine}))
    check_precision(run)
    assert run.rollout.precision == "bf16"
    assert run.engine == VllmEngine()


def test_blocks_of_joined_matrices_must_end_with_them() -> None:
    raw = {"rollout": {"precision": "fp8"}, "engine": {"type": "vllm", "quantization": "fp8_per_block"}}
    run = load(raw)
    assert run.engine.travels_in_fp8
    (said,) = model_problems(run, layers=4, qk_norm=True, joined=(256, 192, 1024))
    assert said.endswith("lie across the end of one with 192 outputs; use engine.quantization=fp8")
    assert not list(model_problems(run, layers=4, qk_norm=True, joined=(256, 128, 1024)))
    run = load(raw | {"engine": raw["engine"] | {"tensor_parallel": 2}})
    (said,) = model_problems(run, layers=4, qk_norm=True, joined=(256, 128, 1024))
    assert "one with 64 outputs" in said


def test_vllm_holds_less_than_it_is_sent() -> None:
    """With one scale per matrix weights travel in bf16."""
    model, engine = ModelConfig.from_hf(QWEN3_8B), {"type": "vllm"}
    wide = estimate.needs(load({"rollout": {"precision": "bf16"}, "engine": engine}), model, 100)
    narrow = estimate.needs(load({"rollout": {"precision": "fp8_full"}, "engine": engine}), model, 100)
    blocks = load({"rollout": {"precision": "fp8_full"}, "engine": engine | {"quantization": "fp8_per_block"}})
    assert narrow.published == wide.published > 1.5 * narrow.engine_weights
    assert estimate.needs(blocks, model, 100).published == narrow.engine_weights


@pytest.mark.parametrize(("precision", "wanted"), [("fp32", "highest"), ("bf16", "high"), ("fp8_full", "high")])
def test_vllm_multiplies_the_numbers_of_bf16_by_tf32(
    precision: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "VLLM_FLOAT32_MATMUL_PRECISION"
    with monkeypatch.context() as changed:
        changed.setattr(os, "environ", dict[str, str]())
        environment.prepare(VllmEngine(), precision)
        assert os.environ[name] == wanted
        changed.setattr(os, "environ", {name: "medium"})
        environment.prepare(VllmEngine(), precision)
        assert os.environ[name] == "medium"


def test_vllm_in_fp8_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load({"rollout": {"precision": "fp8_full"}, "engine": {"type": "vllm"}})
    monkeypatch.setattr(build, "has_gpu", lambda: False)
    said = "rollout.precision=fp8_full with engine=vllm needs a GPU; engine=native simulates FP8 on a CPU"
    assert said in plan.problems(run)
    monkeypatch.setattr(build, "has_gpu", lambda: True)
    assert said not in plan.problems(run)


def test_the_plan_compares_the_precisions() -> None:
    screen = io.StringIO()
    render.show(_run("fp8_full"), Console(file=screen, width=160))
    lines = [line.split("│")[1:-1] for line in screen.getvalue().splitlines() if "B" in line and "│ " in line]
    table = {cells[0].split()[0]: [cell.strip() for cell in cells[1:]] for cells in lines if cells[0].strip()}
    assert table["bf16"][:2] == ["606 kB", "256 B"]
    assert table["fp8_full"][:2] == ["309 kB", "128 B"]
    assert "fp8_full (chosen)" in screen.getvalue()


def test_the_plan_knows_whether_a_model_has_qk_norm(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    save_character_tokenizer(tmp_path, CHARACTERS, END, 256)
    run = Run(rollout=_run("fp8_kv").rollout, model=Checkpoint(str(tmp_path)), root=str(tmp_path / "runs"))
    assert any("need a model with QK-norm" in said for said in plan.problems(run))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("device", ON)
def test_every_arm_of_the_benchmark_is_a_run(arm: str, device: str) -> None:
    run = compose(["experiment=quickstart", "engine=native", *ON[device], *ARMS[arm]])
    assert run.rollout.precision == arm.partition(",")[0]
    assert isinstance(run.engine, NativeEngine)
    assert run.engine.device == device
