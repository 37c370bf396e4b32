"""The trainer beside plain transformers, on a CPU in seconds: that both take the same step, and what is counted."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.models.config import ModelConfig
from asyncrl.training.advantages import with_advantages
from benchmarks import trainer
from benchmarks.rollout import made

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}
WORDS = "--device cpu --shape tiny --answers 16 --tokens 12 --budget 64 --repeats 1"


def _setting(words: str = "") -> trainer.Setting:
    options = trainer.parse([*WORDS.split(), *words.split()])
    setting = trainer.setting_of(options, options.tokens[0])
    return msgspec.structs.replace(setting, config=setting.config | SMALL)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # not every CPU has products in bf16
@pytest.mark.parametrize("words", ["", "--tailed --prompt 5", "--untied --dtype bf16"])
def test_both_sides_take_the_same_step(words: str) -> None:
    setting = _setting(words)
    with made(ModelConfig.from_hf(setting.config), "cpu") as model:
        rows = [row for row in trainer.ROWS if not row.endswith("compiled")]  # which takes a C++ compiler, and minutes
        found = [trainer.measure(model, [setting], row)[0] for row in rows]
    assert [figures.budget for figures in found] == [64, 32, 64, 64, 64, 32]
    first = found[0].gradient_norm
    assert first > 0
    for figures in found:
        assert figures.gradient_norm == pytest.approx(first, rel=0.03 if setting.dtype == "bf16" else 1e-4)
        assert figures.samples_per_second == pytest.approx(16 / figures.seconds)
        assert figures.tokens_per_second == pytest.approx(sum(trainer.lengths(setting)) / figures.seconds)
        assert figures.tflops * figures.seconds == pytest.approx(found[0].tflops * found[0].seconds)
        assert figures.peak_bytes > 1 << 20


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_settings_of_ours_and_adapters_are_those_named() -> None:
    words = "trainer.optimizer=adamw_8bit trainer.checkpoint_activations=1 --dtype bf16 --lora 2"
    options = trainer.parse([*words.split(), *WORDS.split()])
    setting = msgspec.structs.replace(trainer.setting_of(options, 12), config=_setting().config)
    run = trainer.trainer_run(setting, "asyncrl recomputed")
    assert (run.trainer.optimizer, run.trainer.checkpoint_activations) == ("adamw_8bit", 1)
    assert run.trainer.lora.rank == 2
    with made(ModelConfig.from_hf(setting.config), "cpu") as model:
        assert trainer.measure(model, [setting], "asyncrl recomputed")[0].gradient_norm > 0
    with pytest.raises(msgspec.ValidationError, match="optimizer"):
        trainer.trainer_run(msgspec.structs.replace(setting, ours=("trainer.optimizer=sgd",)), "asyncrl kept")


def test_operations_are_counted_as_said() -> None:
    """By hand: 16 answers of 12 tokens behind prompts of one, which eight of them share."""
    setting = _setting()
    blocks = with_advantages(trainer.trainer_run(setting, "asyncrl kept"), trainer.make_groups(setting))
    layer = 32 * (4 + 2 + 2) * 8 + 32 * 32 + 3 * 32 * 64
    tokens, predicted = 2 * (1 + 8 * 11), 16 * 12
    pairs = 2 * 1 + 16 * sum(range(2, 13))
    expected = 6 * (2 * layer * tokens + 50 * 32 * predicted) + 12 * 2 * 4 * 8 * pairs
    assert trainer.model_flops(ModelConfig.from_hf(setting.config), blocks) == expected


def test_operations_of_experts_are_those_of_the_tokens_own() -> None:
    setting = _setting()
    shape = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    dense, mixture = ModelConfig.from_hf(setting.config), ModelConfig.from_hf(setting.config | shape)
    blocks = with_advantages(trainer.trainer_run(setting, "asyncrl kept"), trainer.make_groups(setting))
    tokens, more = 2 * (1 + 8 * 11), 2 * 3 * 32 * 24 + 16 * 32 - 3 * 32 * 64  # two experts and the router
    found = trainer.model_flops(mixture, blocks) - trainer.model_flops(dense, blocks)
    assert found == 6 * 2 * tokens * more


def test_long_tailed_answers_have_the_median_that_was_asked_for() -> None:
    sizes = sorted(trainer.lengths(_setting("--tailed --answers 64 --tokens 150")))
    assert len(sizes) == 64
    assert float(np.median(sizes)) == pytest.approx(150, rel=0.03)
    assert sizes[-1] > 4 * 150


def test_shapes_are_the_published_ones() -> None:
    for words, billions in (
        ("--shape qwen3-1.7b", 1.72),
        ("--shape qwen3-1.7b --vocabulary 49152 --untied", 1.61),
        ("--shape qwen3-8b", 8.19),
        ("--shape smollm2-135m", 0.135),
    ):
        setting = trainer.setting_of(trainer.parse(words.split()))
        assert trainer.parameters(ModelConfig.from_hf(setting.config)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_row_that_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command from end to end: rows in processes of their own, a table and a file."""
    words = f"{WORDS} --vocabulary 50 --out {tmp_path / 'out.json'} --rows"
    trainer.main([*words.split(), "asyncrl kept"])
    shown = capsys.readouterr().out
    assert "tiny: 0.007 G parameters, vocabulary 50, output matrix shared with the embedding" in shown
    assert "answers x tokens: 16 x 12, behind prompts of 1; median of 1 steps" in shown
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["row"], row["error"], row["seconds"] > 0) == ("asyncrl kept", "", True)
    left_out = trainer.line(trainer.Figures(row="asyncrl kept", tokens=12, budget=1, error="OutOfMemoryError: no"))
    assert left_out == "asyncrl kept                  12 left out: OutOfMemoryError: no"
