"""Answers that are equal count, however they are written."""

import pytest

from asyncrl.rewards.math import boxed_reward, reward
from asyncrl.user_code.protocol import RewardFailure, RewardInput
from asyncrl.user_code.score import Score
from asyncrl.user_code.worker import judge

RIGHT = [
    (r"So the answer is \boxed{\frac{1}{2}}.", "1/2"),
    (r"It is $\frac{2}{4}$", r"\frac{1}{2}"),
    ("0.5", r"$\frac12$"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"Thus $x \in (-\infty, 3]$", r"\boxed{(-\infty,3]}"),
    ("The answer is 1,000", "They sell 3 + 7.\n#### 1000"),
    (r"\boxed{1} no: \boxed{42}", "42"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"$x = 7$", "7"),
]
WRONG = [
    (r"\boxed{\frac{1}{3}}", "1/2"),
    (r"\boxed{42} no: \boxed{1}", "42"),
    (r"\boxed{\{1, 2, 3\}}", r"\{1,2\}"),
    ("I do not know.", "42"),
    ("", "42"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right(completion: str, answer: str) -> None:
    assert reward("", completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong(completion: str, answer: str) -> None:
    assert reward("", completion, answer) == 0.0


def test_only_what_is_boxed() -> None:
    assert boxed_reward("", "It is 42", "42") == Score(0.0, {"boxed": 0.0, "right": 0.0})
    assert boxed_reward("", r"It is \boxed{41}", "42") == Score(0.0, {"boxed": 1.0, "right": 0.0})
    assert boxed_reward("", r"It is \boxed{42}", "42") == Score(1.0, {"boxed": 1.0, "right": 1.0})


def test_a_right_answer_that_is_none_is_said() -> None:
    result = judge(reward, RewardInput("", "42", ""))
    assert isinstance(result, RewardFailure)
    assert "is no formula; look at the column that task.answer names" in result.message
