"""Settings of a judge: what cannot work is refused in a sentence that says what to do."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.config.judge import Item, Judge
from asyncrl.errors import ConfigError
from pipelines.compose import changed, compose, from_yaml, to_yaml
from pipelines.train import RESUMABLE

SET = ("reward.judge.url=http://localhost:8000/v1", "reward.judge.model=m", "reward.judge.rubric.right='Is it right?'")


def test_a_judge_from_the_command_line() -> None:
    rubric = "reward.judge.rubric={right: 'Is it right?', clear: {ask: 'How clear?', points: 5, weight: 0.5}}"
    judge = compose([*SET[:2], rubric, "reward.judge.options={temperature: 0}"]).reward.judge
    assert judge.items == {"right": Item(ask="Is it right?"), "clear": Item(ask="How clear?", points=5, weight=0.5)}
    assert judge.options == {"temperature": 0}
    assert judge.address == "http://localhost:8000/v1/chat/completions"
    assert compose(SET).reward.judge.items == {"right": Item(ask="Is it right?")}


def test_as_many_others_as_there_are_may_be_odd() -> None:
    pairs = (*SET, "rollout.group_size=8", "reward.judge.pairs=7")
    assert compose(pairs).reward.judge.pairs == 7
    assert compose([*pairs, "reward.function=", "evaluation.prompts=0"]).reward.judge.pairs == 7


def test_a_run_without_one_says_nothing_of_it() -> None:
    run = compose([])
    assert run.reward.judge == Judge()
    assert not run.reward.judge.on


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    run = compose([*SET, "reward.function="])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run))
    assert from_yaml(path) == run
    assert changed(run, ["reward.judge.max_calls=7"], allowed=RESUMABLE).reward.judge.max_calls == 7
    with pytest.raises(ConfigError, match=r"reward\.judge\.weight=2 cannot be changed here"):
        changed(run, ["reward.judge.weight=2"], allowed=RESUMABLE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["reward.judge.model=m"], "reward.judge.* is set and reward.judge.url is not: name the server, or leave it"),
        (["reward.function="], "reward.function is empty, and there is no reward.judge.url that could judge in its"),
        (SET[:1], "reward.judge.url=http://localhost:8000/v1 needs reward.judge.model, the name that the server"),
        (SET[:2], "reward.judge.rubric is empty: say what the judge is asked, such as reward.judge.rubric.correct="),
        ([*SET, "reward.judge.url=localhost:8000"], "reward.judge.url=localhost:8000 is no address: give one such as"),
        ([*SET, "reward.judge.url='http://h:99999/v1'"], "reward.judge.url is no address: give one such as"),
        (
            [*SET, "reward.judge.url=https://x.org/v1/chat/completions"],
            "/chat/completions is added to it; give reward.judge.url=https://x.org/v1",
        ),
        ([*SET, "reward.judge.rubric.Style=x"], "reward.judge.rubric.Style: a name has up to 34 small letters, digits"),
        ([*SET, "reward.judge.rubric.empty=''"], "reward.judge.rubric.empty asks nothing: write the question"),
        ([*SET, "reward.judge.rubric.a={points: 2}"], "reward.judge.rubric.a.ask is required"),
        ([*SET, "reward.judge.rubric.a={ask: b, points: 0}"], "reward.judge.rubric.a.points=0: expected `int` >= 1"),
        ([*SET, "reward.judge.options.model=x"], "reward.judge.options.model is set for each call by the run itself"),
        ([*SET, "reward.judge.deadline_s=5"], "reward.judge.deadline_s=5 ends every call before reward.judge.timeout_"),
        ([*SET, "reward.judge.when_spent=wait"], "reward.judge.when_spent=wait: invalid enum value 'wait'; use one of"),
        (
            [*SET, "rollout.group_size=4", "reward.judge.pairs=4"],
            "reward.judge.pairs=4 is more than the 3 others that a completion has with rollout.group_size=4: lower it",
        ),
        (
            [*SET, "rollout.group_size=8", "reward.judge.pairs=3"],
            "reward.judge.pairs=3 is odd, and each completion is compared with as many before it as after it: set 4,",
        ),
        (
            [*SET, "rollout.group_size=8", "reward.judge.pairs=2", "reward.judge.rubric.a={ask: b, points: 5}"],
            "reward.judge.rubric.a.points=5: with reward.judge.pairs an item has a winner and no points; leave them",
        ),
        (
            [*SET, "rollout.group_size=8", "reward.judge.pairs=2", "reward.function="],
            "reward.judge.pairs=2 compares completions of one group, and held-out completions have none; set",
        ),
        ([*SET, "reward.judge.rubrik.a=b"], "unknown key reward.judge.rubrik: did you mean reward.judge.rubric?"),
    ],
)
def test_settings_that_cannot_work(given: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "secret",
    [
        "reward.judge.api_key_env='sk-my-secret-key'",
        "reward.judge.url='https://me:sk-my-secret-key@api.example.org/v1'",
    ],
)
def test_a_key_in_the_wrong_place_is_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env") as refused:
        compose([*SET, secret])
    assert "my-secret" not in str(refused.value)
