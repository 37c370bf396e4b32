"""The benchmarks that compare modes and peers: what they set, and a small one from end to end."""

import dataclasses
import json
from pathlib import Path

import pytest
from trl import GRPOConfig

from asyncrl.tasks.base import make_task
from benchmarks import longtail
from benchmarks.peers import trl_grpo
from pipelines.compose import compose


@pytest.mark.parametrize("mode", longtail.MODES)
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_each_mode_adds_one_thing_to_the_one_before(mode: str, groups: int) -> None:
    drafter = ["drafter=ngram"]
    options = longtail.parse(["--groups", str(groups), "--steps", "3"])
    run = compose(["experiment=quickstart", *longtail.common(options), *longtail.settings(mode, groups, drafter)])
    assert run.flow.groups_per_step == groups
    assert run.task == longtail.TASK
    assert (run.flow.groups_per_take == groups) == (mode == "sync" or groups == 1)
    assert run.max_staleness == (0 if mode in ("sync", "stream") else 2)
    assert (run.drafter.__struct_config__.tag == "ngram") == (mode == "speculation")


def test_the_workload_is_long_tailed() -> None:
    task = make_task(longtail.TASK, 0)
    lengths = sorted(len(task.prompt("train", index).answer) for index in range(1000))
    assert lengths[-1] / lengths[500] >= longtail.LONG
    assert lengths[-1] <= longtail.MAX_TOKENS


def test_speculation_alone_needs_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        longtail.parse(["--modes", "speculation"])
    assert "give --head" in capsys.readouterr().err
    assert longtail.parse(["--modes", "speculation", "--drafter", "ngram"]).modes == ["speculation"]


def test_modes_run_and_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "--modes sync speculation --drafter ngram --steps 2 --groups 4 --warm-start 20"
    small = "cluster=inprocess evaluation.prompts=4 model=checkpoint"
    options = longtail.parse(
        [*words.split(), "--root", str(tmp_path), "--out", str(tmp_path / "out.json"), *small.split()]
    )
    found = longtail.compare(options)
    assert [figures.mode for figures in found] == ["sync", "speculation"]
    assert [figures.samples for figures in found] == [64, 64]
    assert found[1].to_sync == pytest.approx(found[1].samples_per_second / found[0].samples_per_second)
    assert found[0].staleness_max == 0
    assert [row["mode"] for row in json.loads((tmp_path / "out.json").read_text())] == ["sync", "speculation"]
    assert "samples/s  1.00x" in capfd.readouterr().out


def test_both_sides_train_on_as_many_samples_of_the_same_limits() -> None:
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    for setting, experiment, model in (
        (trl_grpo.QUICKSTART, "quickstart", None),
        (trl_grpo.SMOLLM2, "smollm2", Path("somewhere")),
    ):
        theirs = trl_grpo.their_arguments(setting, steps=3)
        run = compose([f"experiment={experiment}", *trl_grpo.our_overrides(setting, model, steps=3)])
        assert theirs.keys() <= known
        step = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
        assert step == run.samples_per_step == setting.samples
        assert theirs["num_generations"] == run.rollout.group_size
        assert theirs["max_completion_length"] == run.rollout.max_tokens
        assert theirs["learning_rate"] == run.trainer.lr
    assert setting.samples == 512
    assert theirs["vllm_gpu_memory_utilization"] == run.engine.memory  # type: ignore[union-attr]
    assert theirs["vllm_max_model_length"] == run.engine.max_length  # type: ignore[union-attr]
    assert run.trainer.dtype == "bf16"


def test_chats_are_shown_to_the_peer_turn_by_turn() -> None:
    task, judge = trl_grpo.task_of(trl_grpo.SMOLLM2)
    prompt = task.prompt("train", 0)
    turns = trl_grpo.shown(prompt, chat=True)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 4 + ["user"]
    assert turns[-1]["content"] == prompt.text
    assert judge(prompt.text, turns[1]["content"].replace("<answer>", "<answer>x"), prompt.answer) < 1
