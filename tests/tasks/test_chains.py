"""Chains: right answers, long-tailed sizes, splits that never meet, rewards that look at every step."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.task import ChainsTask
from asyncrl.tasks.chains import CHARACTERS, Chain, Chains, graded_reward, reward
from asyncrl.tasks.registry import make_task

PROMPT, ANSWER = "a3b+2c-1=", "a3b+25c-14$"
indices = st.integers(0, 10**9)


def solve(prompt: str) -> str:
    """Written apart from the task: read the prompt, do the sums."""
    start, *steps = re.findall(r"[a-z][+-]?\d", prompt)
    value, out = int(start[1]), start
    for step in steps:
        value += int(step[1:])
        out += f"{step}{value}"
    return out + "$"


def test_the_written_form() -> None:
    chain = Chain((3, 5, 4))
    assert chain.prompt == PROMPT
    assert chain.worked(chain.values) == ANSWER == solve(PROMPT)
    assert chain.worked((3, 5, 9)) == "a3b+25c-19$"


@given(indices, indices, st.sampled_from(["train", "held_out"]))
def test_every_problem_has_its_right_answer(seed: int, index: int, split: str) -> None:
    prompt = make_task(ChainsTask(), seed).prompt(split, index)
    assert prompt.answer == solve(prompt.text)
    assert len(prompt.answer) == 4 * prompt.size + 3  # every running value is one digit
    assert 2 <= prompt.size <= 24
    assert prompt.text[-1] == "="
    assert set(prompt.text + prompt.answer) <= {*CHARACTERS, "$"}


def test_a_problem_depends_on_seed_split_and_index_only() -> None:
    code = "from asyncrl.tasks.chains import *; print(Chains(ChainsTask(), 7).prompt('train', 12345).text)"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    task = Chains(ChainsTask(), 7)
    task.prompt("train", 0)
    assert other.stdout.strip() == task.prompt("train", 12345).text
    places = [(7, "train", 12345), (8, "train", 12345), (7, "train", 12346), (7, "held_out", 12345)]
    assert len({Chains(ChainsTask(), seed).prompt(split, index).text for seed, split, index in places}) == 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers_are_long_tailed(seed: int) -> None:
    task = Chains(ChainsTask(), seed)
    lengths = [len(task.prompt("train", index).answer) for index in range(3000)]
    median, p95 = np.percentile(lengths, [50, 95])
    assert max(lengths) / median >= 4
    assert p95 / median >= 2.5


def test_splits_never_share_a_text_even_across_seeds() -> None:
    train = {Chains(ChainsTask(), seed).prompt("train", index).text for seed in (0, 1) for index in range(3000)}
    held_out = {Chains(ChainsTask(), seed).prompt("held_out", index).text for seed in (0, 1) for index in range(1000)}
    assert not train & held_out
    # Small problems are few, so without the filter the two would meet.
    assert {len(text) for text in train} & {len(text) for text in held_out if len(text) == 9}


def test_sizes_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="median_size=9 is more than max_size=8"):
        ChainsTask(median_size=9, max_size=8)


@given(indices, st.data())
def test_reward_wants_every_character(index: int, data: st.DataObject) -> None:
    prompt = Chains(ChainsTask(), 0).prompt("train", index)
    assert reward(prompt.text, prompt.answer, prompt.answer) == 1.0
    place = data.draw(st.integers(0, len(prompt.answer) - 1))
    other = data.draw(st.sampled_from([c for c in CHARACTERS + "$" if c != prompt.answer[place]]))
    changed = prompt.answer[:place] + other + prompt.answer[place + 1 :]
    for wrong in (changed, prompt.answer[:place], prompt.answer + other):
        assert reward(prompt.text, wrong, prompt.answer) == 0.0
        assert 0.0 <= graded_reward(prompt.text, wrong, prompt.answer) < 1.0


@pytest.mark.parametrize(
    ("completion", "graded"),
    [
        ("", 0.0),
        ("a4b+25c-14$", 0.0),  # wrong start
        ("a3", 0.25),
        ("a3b+26c-14$", 0.25),  # wrong in the middle, right at the end
        ("a3b+25c-13$", 0.5),
        ("a3b+25c-14", 0.75),  # never came to its end
        ("a3b+25c-14d", 0.75),
        ("a3b+25c-14$", 1.0),
    ],
)
def test_graded_reward_counts_steps_before_the_first_mistake(completion: str, graded: float) -> None:
    assert graded_reward(PROMPT, completion, ANSWER) == graded
