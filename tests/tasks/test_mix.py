"""Several sources as one task: their shares, that a position needs no other state, and that held out stays held out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Run, load
from asyncrl.config.task import MixTask
from asyncrl.curriculum.interleaving import BLOCK, Interleaving, quotas
from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Task
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt
from pipelines.compose import compose, from_yaml, to_yaml
from pipelines.plan.estimate import longest

EASY, HARD = ({"type": "chains", "median_size": size, "max_size": size, "size_spread": 0} for size in (2, 5))


def mix(**sources: dict[str, Any]) -> Run:
    return load({"task": {"type": "mix", "sources": sources}})


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=100))
def test_every_position_belongs_to_one_stream_and_back(weights: list[float]) -> None:
    assert sum(quotas(weights)) == BLOCK
    assert min(quotas(weights)) >= 1
    mixed = Interleaving(weights)
    counts = Counter[int]()
    for index in range(2 * BLOCK + 50):
        stream, position = mixed.locate(index)
        assert position == counts[stream], "each stream is read in order, without gaps"
        assert mixed.index(stream, position) == index
        counts[stream] += 1
    far = 10**12 + 7
    assert mixed.index(*mixed.locate(far)) == far


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=6))
def test_shares_are_kept_from_the_first_prompts_on(weights: list[float]) -> None:
    mixed, counts = Interleaving(weights), Counter[int]()
    for index in range(BLOCK):
        counts[mixed.locate(index)[0]] += 1
        for stream, quota in enumerate(quotas(weights)):
            assert abs(counts[stream] - (index + 1) * quota / BLOCK) < 2
    assert all(abs(q / BLOCK - w / sum(weights)) < 2 / BLOCK for q, w in zip(quotas(weights), weights, strict=True))


def test_both_splits_have_every_source_in_its_share_under_its_name() -> None:
    run = mix(easy={"weight": 3, "task": EASY}, hard={"task": HARD})
    task = make_task(run.task, seed=4)
    for split in ("train", "held_out"):
        prompts = [task.prompt(split, index) for index in range(40)]
        assert Counter(prompt.source for prompt in prompts) == {"easy": 30, "hard": 10}
        assert {(prompt.source, prompt.size) for prompt in prompts} == {("easy", 2), ("hard", 5)}
        assert all(prompt.uid.startswith(f"{prompt.source}/chains/{split}/") for prompt in prompts)
        assert prompts == [make_task(run.task, seed=4).prompt(split, index) for index in range(40)]
        assert prompts != [make_task(run.task, seed=5).prompt(split, index) for index in range(40)]
    texts = [{task.prompt(split, index).text for index in range(400)} for split in ("train", "held_out")]
    assert not texts[0] & texts[1]


def asked(task: Task) -> list[Prompt]:
    return [task.prompt("train", index) for index in range(30)]


def test_the_order_of_the_config_and_other_sources_change_no_prompt() -> None:
    a, b = {"task": EASY}, {"task": HARD}
    one, other = (make_task(run.task, 1) for run in (mix(a=a, b=b), mix(b=b, a=a)))
    assert asked(one) == asked(other)
    more = make_task(mix(a=a, b=b, c=a).task, 1)
    first, twins = ([prompt.text for prompt in asked(more) if prompt.source == source] for source in "ac")
    assert first == [prompt.text for prompt in asked(one) if prompt.source == "a"][: len(first)]
    assert twins != first, "sources of one kind draw apart"


def table(path: Path, texts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts))
    return {"task": {"type": "jsonl", "path": str(path), "held_out": 0.25}}


def test_a_text_that_one_table_holds_out_and_another_trains_on_is_refused(tmp_path: Path) -> None:
    texts = [f"{i}+{i}=" for i in range(40)]
    sums, same = (table(tmp_path / f"{name}.jsonl", texts) for name in ("sums", "same"))
    task = make_task(mix(sums=sums, same=same).task, seed=0)
    assert {task.prompt("train", i).source for i in range(8)} == {"sums", "same"}, "both hold the same texts out"
    more = table(tmp_path / "more.jsonl", texts[:20] + [f"{i}-{i}=" for i in range(80)])
    with pytest.raises(ConfigError, match=r"task.sources.more keeps .* that task.sources.sums trains on, such as '"):
        make_task(mix(sums=sums, more=more).task, seed=0)


def test_a_mix_is_composed_recorded_and_read_again(tmp_path: Path) -> None:
    one = "task.sources.easy={weight: 3, task: {type: chains, max_size: 4}}"
    run = compose(["task=mix", one, "task.sources.hard.task={type: chains}", "task.sources.hard.weight=0.5"])
    assert run.task.weights == {"easy": 3.0, "hard": 0.5}
    assert run.task.worked_examples is not None
    assert run.task.worked_examples.max_size == 16
    (tmp_path / "config.yaml").write_text(to_yaml(run))
    assert from_yaml(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({}, "sources=[] must be 1 to 100 sources"),
        ({"a/b": {"task": EASY}}, "'a/b' must be a name without a slash"),
        ({"a": {"task": EASY, "weight": 0}}, "task.sources.a.weight=0: expected `float` > 0.0"),
        ({"a": {"task": EASY}, "b": {"task": {"type": "chains", "max_size": 1}}}, "task.sources.b.task.max_size=1: "),
        ({"a": {"weight": 1}}, "task.sources.a.task is required"),
        ({"a": {"task": {"type": "mix", "sources": {}}}}, "task.sources.a.task.type=mix: invalid value 'mix'"),
        (
            {"a": {"task": {"type": "reasoning_gym", "dataset": "chain_sum"}}},
            "task.sources.a: reward.function=asyncrl.tasks.chains:reward cannot judge task=reasoning_gym",
        ),
        (
            {"a": {"task": EASY}, "b": {"task": {"type": "verifiers", "environment": "x"}}},
            "task.sources.b is played by a harness of its own, and task.sources.a is not",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mix(**sources)
    assert said in str(caught.value)


def test_a_plan_looks_at_the_longest_prompt_of_all_sources(tmp_path: Path) -> None:
    few = table(tmp_path / "few.jsonl", ["1+1=", "2+2="])
    tokens, prompt = longest(mix(few=few, hard={"weight": 0.001, "task": HARD}))
    assert (tokens, prompt.uid) == (18, "longest"), "the start, three characters for each operation, the end"


def test_a_mix_of_other_things_than_chains_has_no_worked_examples() -> None:
    run = mix(a={"task": EASY}, b={"task": {"type": "jsonl", "path": "x"}})
    assert isinstance(run.task, MixTask)
    assert run.task.worked_examples is None
