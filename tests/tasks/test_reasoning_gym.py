"""reasoning-gym as a source of prompts, and its marks as rewards."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import load
from asyncrl.config.task import ReasoningGymTask
from asyncrl.errors import ConfigError, MissingDependencyError
from asyncrl.tasks import reasoning_gym
from asyncrl.tasks.base import Split
from asyncrl.tasks.reasoning_gym import graded_reward, reward
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from asyncrl.user_code.score import Score
from asyncrl.user_code.worker import judge

SUMS = ReasoningGymTask(dataset="chain_sum", options={"max_terms": 2, "max_digits": 1})


def prompts(settings: ReasoningGymTask, split: Split, count: int, seed: int = 0) -> list[Any]:
    task = make_task(settings, seed)
    return [task.prompt(split, index) for index in range(count)]


# Prompts.


def test_a_prompt_is_the_question_with_the_instruction() -> None:
    prompt = prompts(SUMS, "train", 1)[0]
    question, instruction = prompt.text.split("\n")
    assert question.startswith("State the final answer to the following arithmetic problem: ")
    assert instruction == SUMS.instruction
    assert prompt.uid == "chain_sum/train/0"
    held = json.loads(prompt.answer)
    assert (held["dataset"], held["options"], held["entry"]["question"]) == ("chain_sum", SUMS.options, question)
    bare = ReasoningGymTask(dataset="chain_sum", options=SUMS.options, instruction="")
    assert prompts(bare, "train", 1)[0].text == question


def test_a_prompt_depends_on_seed_split_and_index_alone() -> None:
    forth = prompts(SUMS, "train", 20)
    task = make_task(SUMS, 0)
    assert [task.prompt("train", index) for index in reversed(range(20))] == forth[::-1]
    assert [prompt.text for prompt in prompts(SUMS, "train", 20, seed=1)] != [prompt.text for prompt in forth]


def test_the_splits_share_no_text_whatever_the_seed() -> None:
    train = {prompt.text for seed in (0, 1) for prompt in prompts(SUMS, "train", 400, seed)}
    held_out = {prompt.text for seed in (0, 1) for prompt in prompts(SUMS, "held_out", 100, seed)}
    assert len(train) > 100
    assert len(held_out) > 10
    assert not train & held_out


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        ("chain_sums", {}, "task.dataset=chain_sums is not one of reasoning-gym's: did you mean chain_sum?"),
        ("chain_sum", {"max_term": 2}, "unknown key task.options.max_term of task.dataset=chain_sum: did you mean "),
        ("chain_sum", {"seed": 2}, "unknown key task.options.seed"),
        ("chain_sum", {"min_terms": 9}, "do not fit task.dataset=chain_sum: max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, "do not fit task.dataset=chain_sum"),
        ("spell_backward", {"min_word_len": 90, "max_word_len": 99}, "cannot make a prompt: IndexError"),
        ("chain_sum", {"min_terms": 1, "max_terms": 1, "max_digits": 1, "min_digits": 1}, None),
    ],
)
def test_what_does_not_fit_is_refused(dataset: str, options: dict[str, Any], said: str | None) -> None:
    settings = ReasoningGymTask(dataset=dataset, options=options)
    if said is None:  # ten questions are few, but enough for both splits
        assert len({prompt.text for split in ("train", "held_out") for prompt in prompts(settings, split, 50)}) == 10
        return
    with pytest.raises(ConfigError) as caught:
        prompts(settings, "train", 1)
    assert said in str(caught.value)


def test_solved_examples_are_earlier_turns() -> None:
    settings = ReasoningGymTask(dataset="chain_sum", options=SUMS.options, examples=2)
    first, second = prompts(settings, "train", 1)[0], prompts(settings, "held_out", 1)[0]
    assert first.earlier == second.earlier  # the same for every question: one prefix for all
    asked, solved = first.earlier[::2], first.earlier[1::2]
    assert len(set(asked)) == 2
    for text, answer in zip(asked, solved, strict=True):
        expression = text.split("\n")[0].removesuffix(" =").rpartition(": ")[2]
        left, sign, right = expression.split()
        assert answer == f"<answer>{int(left) + int(sign + right)}</answer>"
    assert not set(asked) & {prompt.text for prompt in prompts(settings, "held_out", 100)}


@pytest.mark.parametrize(
    ("dataset", "examples", "said"),
    [
        ("rearc", 0, "is judged by values that do not fit into JSON"),
        ("propositional_logic", 1, "has no references to show as examples: set task.examples=0"),
    ],
)
def test_datasets_that_cannot_serve(dataset: str, examples: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_task(ReasoningGymTask(dataset=dataset, examples=examples), 0)


def test_a_split_without_questions_is_an_error_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "is_held_out", lambda text: False)
    with pytest.raises(ConfigError, match="makes too few different prompts: none was found for the split held_out"):
        prompts(SUMS, "held_out", 1)


def test_without_the_package_one_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # what Python writes there to forbid an import
    monkeypatch.delitem(sys.modules, "asyncrl.tasks.reasoning_gym")
    with pytest.raises(MissingDependencyError, match=r"pip install 'asyncrl\[reasoning\]'"):
        make_task(SUMS, 0)


def test_settings() -> None:
    raw = {"type": "reasoning_gym", "dataset": "chain_sum", "options": {"max_terms": 2, "words": ["a", "b"]}}
    function = {"function": "asyncrl.tasks.reasoning_gym:reward"}
    assert load({"task": raw, "reward": function}).task == ReasoningGymTask(
        dataset="chain_sum", options={"max_terms": 2, "words": ["a", "b"]}
    )
    with pytest.raises(ConfigError, match=r"cannot judge task=reasoning_gym; set reward.function=asyncrl.tasks.reason"):
        load({"task": raw})
    with pytest.raises(ConfigError, match=r"task.dataset is required"):
        load({"task": {"type": "reasoning_gym"}, "reward": function})
    with pytest.raises(ConfigError, match=r"task.examples=2 are turns of a chat: set rollout.chat=true"):
        load({"task": raw | {"examples": 2}, "reward": function})
    with pytest.raises(ConfigError, match=r"rollout.system is the system message of a chat"):
        load({"rollout": {"system": "Be brief."}})


# Rewards.

FOUR = json.dumps(
    {"dataset": "chain_sum", "options": {}, "entry": {"question": "2 + 2 =", "answer": "4", "metadata": {}}}
)


@pytest.mark.parametrize(
    ("completion", "right", "graded"),
    [
        ("<answer>4</answer>", 1, 1),
        ("First 2, then 2.\n<answer>\n 4 \n</answer> Done.", 1, 1),
        ("<answer>5</answer> no, <answer>4</answer>", 1, 1),  # the last one counts
        ("<answer>4.0</answer>", 1, 1),
        ("<answer>it is 4</answer>", 0, 0.1 + 0.9 / 7),  # reasoning-gym: one of seven characters is the answer
        ("<answer>5</answer>", 0, 0.1),
        ("<answer></answer>", 0, 0),
        ("<answer>4", 0, 0),
        ("4", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards(completion: str, right: float, graded: float) -> None:
    assert reward("", completion, FOUR) == right
    parts = graded_reward("", completion, FOUR)
    assert sum(parts.values()) == pytest.approx(graded, abs=1e-12)
    assert (sum(parts.values()) == 1) == (right == 1)
    assert parts["format"] == (0.1 if graded else 0)


@given(st.text(), st.text())
def test_a_reward_is_a_number_whatever_the_model_writes(before: str, inside: str) -> None:
    completion = f"{before}<answer>{inside}</answer>"
    for function in (reward, graded_reward):
        result = judge(function, RewardInput("", completion, FOUR))
        assert not isinstance(result, RewardFailure)
        assert 0 <= (result.total if isinstance(result, Score) else result) <= 1


DATASETS = (
    "basic_arithmetic",
    "countdown",
    "gcd",
    "leg_counting",
    "letter_counting",
    "number_sorting",
    "spell_backward",
)


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_known_answer_is_right_after_its_journey_as_json(dataset: str) -> None:
    for prompt in prompts(ReasoningGymTask(dataset=dataset), "train", 5):
        answer = json.loads(prompt.answer)["entry"]["answer"]
        assert reward(prompt.text, f"<answer>{answer}</answer>", prompt.answer) == 1
        assert sum(graded_reward(prompt.text, f"<answer>{answer}</answer>", prompt.answer).values()) == 1
        assert reward(prompt.text, "<answer>no</answer>", prompt.answer) == 0
