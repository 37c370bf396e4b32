"""What a judge is asked, and how its replies are read: those of real models, and those that are no verdict."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.judge import Item, Judge
from asyncrl.errors import ConfigError
from asyncrl.judges.form import Form, Pair, read, winner
from asyncrl.user_code.protocol import RewardInput

ITEMS = {"correct": Item(ask="Is it right?"), "clear_style": Item(ask="Is it clear?", points=5)}
FOUR = {"correct": 1.0, "clear_style": 4.0}
GIVEN = RewardInput("What is {answer}?", "It is 7. {rubric} {nonsense}", "42")


def asked(template: str, given: RewardInput = GIVEN) -> str:
    form = Form(Judge(url="http://x", model="m", rubric=dict(ITEMS), template=template))
    (message,) = form.body(given)["messages"]
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(
    "reply",
    [
        '{"correct": true, "clear_style": 4}',
        'Sure! Here is my verdict:\n```json\n{"correct": "yes", "clear_style": "4/5"}\n```\nBest wishes.',
        '<think>{"correct": false, "clear_style": 0} would be harsh</think>{"correct": 1, "clear_style": 4.0}',
        '{"Correct": "Yes.", "Clear Style": "4 out of 5"}',
        '{"correct": {"score": true, "reason": "7 is 7"}, "clear_style": {"reason": "so so", "score": 4}}',
        '{"verdict": {"correct": true, "clear_style": 4}, "confidence": 0.9}',
        'At first I thought {"correct": false, "clear_style": 1}. No: {"correct": true, "clear_style": 4}',
        "**Correct:** yes\n- clear style: 4/5\n",
        '{"correct": true, "note": "a brace { is open", "clear_style": 4}',
    ],
)
def test_replies_that_say_the_same(reply: str) -> None:
    assert read(reply, ITEMS) == FOUR


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I would rather not say.",
        '{"correct": true}',
        '{"correct": true, "clear_style": 6}',
        '{"correct": true, "clear_style": -1}',
        '{"correct": true, "clear_style": NaN}',
        '{"correct": true, "clear_style": true}',
        '{"correct": true, "clear_style": "4/10"}',
        '{"correct": 2, "clear_style": 4}',
        '{"correct": null, "clear_style": 4}',
        '{"correct": true, "clear_style": 4',
        '{"correct": "yes and no", "clear_style": 4}',
        '{"a":' * 5000,
    ],
)
def test_replies_that_are_no_verdict(reply: str) -> None:
    assert read(reply, ITEMS) is None


@pytest.mark.parametrize(("reply", "points"), [("Yes.", 1.0), (" no\n", 0.0), ("perhaps", None), ("0.5", 0.5)])
def test_a_single_item_may_be_answered_in_a_word(reply: str, points: float | None) -> None:
    assert read(reply, {"right": Item(ask="?")}) == (None if points is None else {"right": points})


@given(st.text(max_size=200))
def test_any_reply_is_read_without_an_error(reply: str) -> None:
    for text in (reply, json.dumps({"correct": reply, "clear_style": reply}), '{"correct": ' + reply):
        points = read(text, ITEMS)
        assert points is None or (0 <= points["correct"] <= 1 and 0 <= points["clear_style"] <= 5)


def test_a_completion_cannot_ask_for_the_reference() -> None:
    text = asked("{prompt} | {completion} | {{answer}}")
    assert text.startswith("What is {answer}? | It is 7. {rubric} {nonsense} | {answer}\n\nReply with one JSON object")
    assert "42" not in text


def test_the_rubric_says_what_is_asked_and_in_what_form() -> None:
    text = asked("")
    assert '- "correct": true or false. Is it right?' in text
    assert '- "clear_style": a number from 0 to 5. Is it clear?' in text
    assert "<reference>\n42\n</reference>" in text
    assert text.count("Reply with one JSON object") == 1


def test_a_conversation_is_shown_turn_by_turn() -> None:
    turns = RewardInput("p", "c", "a", ("1+1?", "=2=", "2"))
    assert asked("{turns}", turns).startswith("[model]\n1+1?\n\n[environment]\n=2=\n\n[model]\n2\n\n")
    assert asked("{turns}", RewardInput("p", "c", "a")).startswith("c\n\n")


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "judge.txt"
    file.write_text('Answer {"like": "this"} about \\boxed{{x}}: {completion}')
    assert asked(str(file)).startswith('Answer {"like": "this"} about \\boxed{x}: It is 7.')


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("Judge {prompt}", "has neither {completion} nor {turns}: the judge would not see what it judges"),
        ("{completion} of {question}", "{question} is not known; there are {prompt}, {completion}, {answer}"),
        ("no/such/file.txt", "cannot be read as a file: .*No such file"),
    ],
)
def test_a_template_that_cannot_be_used(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.judge.template=.*{said.replace('{', '.').replace('}', '.')}"):
        asked(template)


def test_the_score_is_the_weighted_mean_of_the_items() -> None:
    rubric = {"right": "?", "clear": Item(ask="?", points=4, weight=3.0)}
    form = Form(Judge(url="http://x", model="m", rubric=rubric))
    assert form.score({"right": 1.0, "clear": 2.0}) == (1 + 3 * 0.5) / 4


# -- two completions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "points"),
    [
        ('{"correct": "first", "clear_style": "second"}', (1.0, 0.0)),
        ('```json\n{"correct": "Tie", "clear_style": {"reason": "shorter", "winner": "second"}}\n```', (0.5, 0.0)),
        ('<think>{"correct": "second", "clear_style": "tie"}</think>{"correct": "A", "clear_style": "B"}', (1.0, 0.0)),
        ("**Correct:** the first answer\n- clear style: both", (1.0, 0.5)),
        ('{"correct": 1, "clear_style": 2}', (1.0, 0.0)),
        ('{"correct": "first"}', None),
        ('{"correct": "first", "clear_style": "third"}', None),
        ('{"correct": true, "clear_style": "first"}', None),
        ('{"correct": null, "clear_style": 0}', None),
        ("I cannot choose.", None),
    ],
)
def test_the_better_of_two(reply: str, points: tuple[float, float] | None) -> None:
    assert read(reply, ITEMS, winner) == (None if points is None else dict(zip(ITEMS, points, strict=True)))


def of_two(template: str, given: Pair) -> str:
    form = Form(Judge(url="http://x", model="m", rubric={"right": "Which is right?"}, template=template, pairs=2))
    return form.body(given)["messages"][0]["content"]


def test_two_completions_are_shown_in_their_order() -> None:
    other = RewardInput(GIVEN.prompt, "{first}", "42", ("hello", "and?", "{first}"))
    pair = Pair(GIVEN, other)
    assert of_two("{second}|{first}|{answer}|{rubric}", pair) == (
        "[model]\nhello\n\n[environment]\nand?\n\n[model]\n{first}|It is 7. {rubric} {nonsense}|42|"
        "Reply with one JSON object and nothing else. For each field say which answer is better in it, as "
        '"first", "second" or "tie":\n- "right": Which is right?'
    )
    ours, turned = of_two("", pair), of_two("", pair.turned)
    assert "<first>\nIt is 7. {rubric} {nonsense}\n</first>" in ours
    assert "<second>\nIt is 7. {rubric} {nonsense}\n</second>" in turned
    with pytest.raises(ConfigError, match=r"has not both \{first\} and \{second\}"):
        of_two("{first} alone", pair)
    with pytest.raises(ConfigError, match=r"\{completion\} is not known; there are \{prompt\}, \{first\}"):
        of_two("{completion}", pair)
