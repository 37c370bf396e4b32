"""The benchmarks that compare modes and peers: what they set, and a small one from end to end."""

import dataclasses
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import GRPOConfig

from asyncrl.config import Run, Trainer
from asyncrl.system.user_functions import load_function
from asyncrl.tasks.registry import make_task
from benchmarks import checkpoint, correction_overhead, lists, longtail, runs, weight_update
from benchmarks.fake_nodes import COUNTED
from benchmarks.peers import trl_grpo
from benchmarks.runs import Point, reached, steady
from pipelines.compose import compose


@pytest.mark.slow
def test_buffer_and_queues_carry_the_same_trajectories() -> None:
    """On Ray, in a process of its own: it looks once whom it lets in."""
    command = [sys.executable, "-m", "benchmarks.buffer_vs_ray_queue", "--trajectories", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "queue, array batches" in done.stdout


def test_what_a_checkpoint_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--answers", "2", "--tokens", "16", "--repeats", "1", "--device", "cpu", "--directory", str(tmp_path)]
    checkpoint.main([*words, "trainer.optimizer=adamw_8bit"])
    said = capsys.readouterr().out
    assert "s for the copy" in said
    assert "a checkpoint at a stop" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", longtail.MODES)
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_each_mode_adds_one_thing_to_the_one_before(mode: str, groups: int) -> None:
    drafter = ["drafter=ngram"]
    options = longtail.parse(["--groups", str(groups), "--steps", "3", "--staleness", "4"])
    own = longtail.settings(mode, options, drafter)
    run = compose(["experiment=quickstart", *longtail.common(options), *own])
    assert run.flow.groups_per_step == groups
    assert run.task == longtail.TASK
    assert (run.flow.groups_per_take == groups) == (mode == "sync" or groups == 1)
    assert run.max_staleness == {"sync": 0, "stream": 0, "async": Run().max_staleness}.get(mode, 4)
    assert (run.drafter.__struct_config__.tag == "ngram") == (mode in ("speculation", "fp8"))
    assert run.rollout.precision == ("fp8_full" if mode == "fp8" else "fp32")
    assert not run.checkpoint.last


@pytest.mark.parametrize("mode", longtail.MODES)
def test_real_words_are_compared_by_the_same_modes(mode: str) -> None:
    options = longtail.parse(["--words", "models/smollm2", "--samples", "40960"])
    run = compose(["experiment=smollm2", *longtail.common(options), *longtail.settings(mode, options, [])])
    assert (run.flow.groups_per_step, run.rollout.group_size, run.rollout.max_tokens) == (64, 8, 1024)
    assert run.rollout.precision == ("fp8_full" if mode == "fp8" else "bf16")
    assert run.max_staleness == {"sync": 0, "stream": 0, "async": 2}.get(mode, 20)
    assert (run.steps, run.trainer.decay_steps, run.evaluation.every) == (80, 26, 8)
    assert load_function(run.reward.function, "reward.function")("", "<answer>a</answer>", "a") == 1


def test_the_workload_is_long_tailed() -> None:
    task = make_task(longtail.TASK, 0)
    lengths = sorted(len(task.prompt("train", index).answer) for index in range(1000))
    assert lengths[-1] / lengths[500] >= longtail.LONG
    assert lengths[-1] <= longtail.MAX_TOKENS


def test_lists_have_a_tail_too() -> None:
    asked = list(islice(lists.prompts(), 2000))
    sizes = sorted(len(prompt.answer.split(", ")) for prompt in asked)
    assert (sizes[0], sizes[1000], sizes[-1] >= 20 * sizes[1000]) == (3, 5, True)
    assert asked[:9] == list(islice(lists.prompts(), 9))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>c, b, a</answer>", 1.0),
        (" <answer>c, b, a</answer>\n", 1.0),
        ("<answer>c, a, b</answer>", 0.1 + 0.9 / 3),
        ("<answer>c, b, a, a</answer>", 0.1 + 0.9 * 3 / 4),
        ("<answer>c, b", 0.9 * 2 / 3),
        ("<answer></answer>", 0.1),
        ("c, b, a", 0.0),
        ("Well: <answer>c, b, a</answer>", 0.0),
        ("<answer>c, b, a</answer> or so", 0.0),
    ],
)
def test_lists_earn_by_what_is_right_in_front(completion: str, expected: float) -> None:
    assert lists.reward("", completion, "c, b, a") == pytest.approx(expected)


def test_speculation_alone_needs_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        longtail.parse(["--modes", "speculation"])
    assert "give --head" in capsys.readouterr().err
    assert longtail.parse(["--modes", "speculation", "--drafter", "ngram"]).modes == ["speculation"]


@pytest.mark.slow
def test_modes_run_and_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "--modes sync speculation fp8 --drafter ngram --steps 2 --groups 4 --warm-start 20 --evaluate-every 1"
    small = "cluster=inprocess evaluation.prompts=4 rollout.fp8.keep_first=1 rollout.fp8.keep_last=1"  # FP8 is refused
    options = longtail.parse(
        [*words.split(), "--root", str(tmp_path), "--out", str(tmp_path / "out.json"), *small.split()]
    )
    found = longtail.compare(options)
    assert [figures.mode for figures in found] == ["sync", "speculation"]
    assert [figures.samples for figures in found] == [64, 64]
    assert found[1].to_sync == pytest.approx(found[1].samples_per_second / found[0].samples_per_second)
    assert found[0].staleness_max == 0
    assert [row["mode"] for row in json.loads((tmp_path / "out.json").read_text())] == ["sync", "speculation"]
    assert not list((tmp_path / "sync" / "checkpoints").glob("step-*"))
    _only_the_counted_steps_are_compared_with_a_peer(tmp_path / "sync")
    shown = capfd.readouterr()
    assert "samples/s  1.00x" in shown.out
    assert "all modes: seed 0, 2 steps of 32 samples, lr 0.0002 (grows over the first 0 steps" in shown.out
    for figures in found:
        assert [point.samples for point in figures.curve] == [0, 32, 64]
        assert figures.curve[-1].held_out == figures.held_out
    assert "fp8          left out: the run was refused, see above" in shown.out
    assert "so that nothing is quantized" in shown.err


def test_bars_say_what_is_held() -> None:
    sync = _figures("sync", 100.0)
    good, slow = _figures("partial", 170.0), _figures("speculation", 240.0, trainer_wait=0.2, held_out=0.45)
    assert longtail.bars([sync, good, slow]) == [
        "held     long-tailed: the longest answer is 10.0 times the median, wanted 8",
        "held     partial: 1.70x sync, wanted 1.6x",
        "held     partial: trainer waits 5%, at most 10 %",
        "held     partial: held-out +0.0 points, at most 3 behind sync",
        "NOT held speculation: 2.40x sync, wanted 2.5x",
        "NOT held speculation: trainer waits 20%, at most 10 %",
        "NOT held speculation: held-out -5.0 points, at most 3 behind sync",
    ]


def _only_the_counted_steps_are_compared_with_a_peer(directory: Path) -> None:
    rows = pq.read_table(directory / "metrics.parquet").to_pylist()
    found = runs.count(directory, range(1, 2))
    assert found.seconds == pytest.approx(rows[1]["loop_seconds"] - rows[0]["loop_seconds"])
    assert (found.samples, found.tokens) == (32, rows[1]["tokens"])
    assert found.learned in (0.0, 0.25, 0.5, 0.75, 1.0)  # of four groups
    assert runs.count(directory, range(2)).samples == 64
    rate = trl_grpo.our_rate(directory, "asyncrl", range(1, 2))
    assert rate.mean_tokens * rate.samples_per_second == pytest.approx(rate.tokens_per_second)


def test_modes_that_learn_with_other_settings_are_not_compared() -> None:
    one = Run()
    other = Run(trainer=Trainer(lr=1e-3))
    assert "grpo(), correction importance(), aggregation by token" in longtail.same([one, one])
    with pytest.raises(SystemExit, match="nothing could be said about asynchrony"):
        longtail.same([one, other])


def test_a_table_says_when_which_score_was_reached() -> None:
    points = (Point(0, 0.0, 0.1), Point(512, 10.0, 0.3), Point(1024, 20.0, 0.7), Point(1536, 25.0, 0.6))
    head, row = longtail.table([msgspec.structs.replace(_figures("async", 50.0), curve=points)], [0.5, 0.8], 1024)
    assert " ".join(head.split()) == (
        "mode staleness samples/s to sync at 1024 to 0.5: samples seconds to 0.8: samples seconds last"
    )
    assert row.split() == ["async", "0", "50.0", "0.50x", "0.700", "768", "15.0", "-", "-", "0.500"]
    assert reached(points, 0.1) == points[0]
    assert reached((), 0.1) is None


def test_steps_behind_an_evaluation_count_as_long_as_the_others(tmp_path: Path) -> None:
    """Eight steps of a second, but for the first, which takes five, and two that were prepared in an evaluation."""
    ends = [5.0, 6.0, 7.0, 8.0, 8.1, 8.2, 9.2, 10.2]
    rows = [{"samples": 10, "loop_seconds": end} for end in ends]
    same = {"wait_seconds": 0.5, "train_seconds": 0.1, "sync_seconds": 0.1, "generated_tokens": 0}
    pq.write_table(pa.Table.from_pylist([row | same for row in rows]), tmp_path / "metrics.parquet")
    scores = {str(step): {"sampled": step / 10} for step in (0, 4, 8)}
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": scores}))
    assert [runs.undisturbed(step, 4) for step in range(8)] == [True, True, True, True, False, False, False, True]
    found = runs.curve(tmp_path, every=4)
    assert [(point.samples, point.held_out) for point in found] == [(0, 0.0), (40, 0.4), (80, 0.8)]
    assert [point.seconds for point in found] == pytest.approx([0.0, 8.0, 12.0])
    assert steady(tmp_path, every=4).samples_per_second == pytest.approx(10)
    assert steady(tmp_path).samples_per_second == pytest.approx(40 / 2.2)


def test_a_function_alone_answers_or_says_why_not() -> None:
    assert runs.alone(divmod, 7, 2) == (3, 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: "):
        runs.alone(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="the process ended with 3"):
        runs.alone(os._exit, 3)


def test_an_update_is_told_by_its_moments() -> None:
    span = weight_update.Span
    assert weight_update.course(span(2.0, 2.01), span(1.999, 2.0045), 2.004) == (
        "in the middle: no token from -1.0 to 4.5 ms after the call, the version changed at 4.0, "
        "load_weights returned at 10.0"
    )


def test_a_step_is_as_long_as_those_around_the_update_that_it_does_not_touch() -> None:
    span, update = weight_update.Span, weight_update.Span(10.0, 10.01)
    waits = [span(9.7, 9.799), span(9.9, 9.905), span(9.998, 10.004), span(10.004, 10.011), span(10.02, 10.026)]
    waits += [span(10.1, 10.107), span(10.2, 10.3)]
    assert weight_update.step_around(waits, update) == pytest.approx(0.006)


@pytest.mark.parametrize(("copy", "held", "within"), [(0.00115, "held", 5), (0.00105, "NOT held", 4)])
def test_a_pause_may_be_a_copy_and_a_step(copy: float, held: str, within: int) -> None:
    """Beyond their steps pauses are 0.7, 0.8, 0.9, 1.0 and 1.1 ms."""
    pauses, steps = [0.0057, 0.0068, 0.0049, 0.0060, 0.0071], [0.005, 0.006, 0.004, 0.005, 0.006]
    assert weight_update.verdict(pauses, steps, copy) == (
        f"{held}: median pause 6.00 ms, step 5.00 ms; beyond its step a pause is 0.90 ms, "
        f"a copy of the weights {copy * 1e3:.2f} ms; {within} of 5 are within: 5.7, 6.8, 4.9, 6.0, 7.1 ms"
    )


def _figures(mode: str, rate: float, *, trainer_wait: float = 0.05, held_out: float = 0.5) -> longtail.Figures:
    return longtail.Figures(
        mode=mode,
        samples=640,
        samples_per_second=rate,
        to_sync=rate / 100,
        tokens_per_second=1.0,
        trainer_wait=trainer_wait,
        step_seconds=1.0,
        train_seconds=0.5,
        sync_seconds=0.1,
        held_out=held_out,
        held_out_first=0.4,
        staleness_max=2,
        accepted=None,
        learned=0.5,
        median_length=11,
        longest=110,
        peak_memory_bytes=None,
    )


def test_rates_leave_the_first_steps_out(tmp_path: Path) -> None:
    same = {"samples": 10, "train_seconds": 0.5, "sync_seconds": 0.1}
    rows = [
        {**same, "loop_seconds": seconds, "wait_seconds": waited, "generated_tokens": tokens}
        for seconds, waited, tokens in ((50.0, 40.0, 9), (51.0, 0.0, 100), (53.0, 1.0, 200), (55.0, 0.0, 400))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "metrics.parquet")
    found = steady(tmp_path)
    assert (found.samples_per_second, found.tokens_per_second) == (20 / 4, 300 / 4)
    assert (found.trainer_wait, found.step_seconds, found.train_seconds) == (0.25, 2.0, 0.5)
    found = steady(tmp_path, ends=1)  # nor the last
    assert (found.samples_per_second, found.trainer_wait, found.step_seconds) == (10 / 2, 0.5, 2.0)


@pytest.mark.parametrize(
    ("line", "nodes"),
    [("nodes 1763.25 3\n", "3"), ("nodes 1763.25 \x1b[36m(autoscaler +3s)\n", None), ("nodes 17\n", None)],
)
def test_nodes_are_counted_in_whole_lines(line: str, nodes: str | None) -> None:
    found = COUNTED.fullmatch(line)
    assert (found and found[2]) == nodes


def test_both_sides_train_on_as_many_samples_of_the_same_limits() -> None:
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    for setting, experiment, model in (
        (trl_grpo.QUICKSTART, "quickstart", None),
        (trl_grpo.SMOLLM2, "smollm2", Path("somewhere")),
    ):
        theirs = trl_grpo.their_arguments(setting, setting.micro_batches[0], steps=3)
        run = compose([f"experiment={experiment}", *trl_grpo.our_overrides(setting, model, steps=3)])
        assert theirs.keys() <= known
        assert not any(setting.samples % size for size in setting.micro_batches)
        step = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
        assert step == run.samples_per_step == setting.samples
        assert theirs["num_generations"] == run.rollout.group_size
        assert theirs["max_completion_length"] == run.rollout.max_tokens
        assert theirs["learning_rate"] == run.trainer.lr
    assert setting.samples == 512
    assert theirs["vllm_gpu_memory_utilization"] == run.engine.memory  # type: ignore[union-attr]
    assert theirs["vllm_max_model_length"] == run.engine.max_length  # type: ignore[union-attr]
    assert run.trainer.dtype == "bf16"
    native = compose(["experiment=smollm2", *trl_grpo.our_overrides(setting, model, steps=3, engine="native")])
    assert native.engine.device == "cuda"  # type: ignore[union-attr]


def test_the_peer_is_compared_at_its_best() -> None:
    ours, slow, fast = (
        trl_grpo.Rate(side=side, samples_per_second=rate, tokens_per_second=rate * size, mean_tokens=size, learned=0.5)
        for side, rate, size in (("asyncrl", 90.0, 10.0), ("TRL, 1 at a time", 10.0, 12.0), ("TRL, 2", 20.0, 15.0))
    )
    found = trl_grpo.Figures(setting=trl_grpo.QUICKSTART, warm=1, steps=12, asyncrl=[ours], trl=[slow, fast])
    lines = trl_grpo.verdict(found).splitlines()
    assert lines[0] == "steps 2 to 13 of both sides"
    assert lines[-1] == (
        "asyncrl over the best of TRL: 4.5x the samples and 3.0x the tokens per second; wanted 4x: held"
    )


def test_chats_are_shown_to_the_peer_turn_by_turn() -> None:
    task, judge = trl_grpo.task_of(trl_grpo.SMOLLM2)
    prompt = task.prompt("train", 0)
    turns = trl_grpo.shown(prompt, chat=True)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 4 + ["user"]
    assert turns[-1]["content"] == prompt.text
    graded = judge(prompt.text, turns[1]["content"].replace("<answer>", "<answer>x"), prompt.answer)
    assert isinstance(graded, dict)
    assert sum(graded.values()) < 1


@pytest.mark.slow
def test_the_cost_of_the_correction_is_found_where_the_learner_calls_it() -> None:
    runs.alone(correction_overhead.main, ["--steps", "1"])
