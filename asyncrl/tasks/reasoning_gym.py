"""Prompts from reasoning-gym, a library of generators that also judge the completions.

The answer is expected between <answer> and </answer>; the reasoning around it is not judged.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from asyncrl.config.errors import did_you_mean
from asyncrl.config.task import ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.system.optional import require
from asyncrl.tasks.base import Split, is_held_out
from asyncrl.types import Prompt

# Here and not where it is used: importing it takes seconds, which must not count as time spent on the first reward.
gym = require("reasoning_gym", extra="reasoning")
SIZE = 20_000
"""Prompts to draw from; some generators make all of them at the start, and one refuses to make more."""
MAX_DRAWS = 1000
"""One text in eight is held out, so a split of which none is found within these is empty."""
FORMAT_SHARE = 0.1
"""Of the graded reward: for an answer that stands between its tags, right or wrong."""


class Question(msgspec.Struct, frozen=True):
    """What `Prompt.answer` holds, as JSON: all that judging needs."""

    dataset: str
    options: dict[str, Any]
    entry: dict[str, Any]


class ReasoningGym:
    """Prompts of one dataset; the text alone decides the split it belongs to."""

    def __init__(self, settings: ReasoningGymTask, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._dataset = open_dataset(settings.dataset, settings.options, seed)
        self._check_judge(self._entry(0))
        shown = [self._draw("train", f"examples/{number}") for number in range(settings.examples)]
        self._earlier = tuple(turn for entry in shown for turn in (self._text(entry), self._solution(entry)))

    def prompt(self, split: Split, index: int) -> Prompt:
        entry = self._draw(split, f"{split}/{index}")
        return Prompt(
            uid=f"{self._settings.dataset}/{split}/{index}",
            text=self._text(entry),
            answer=self._json(entry),
            earlier=self._earlier,
        )

    def _draw(self, split: Split, stream: str) -> dict[str, Any]:
        random = Random(f"{self._seed}/{stream}")
        for _ in range(MAX_DRAWS):
            entry = self._entry(random.randrange(SIZE))
            if is_held_out(entry["question"]) == (split == "held_out"):
                return entry
        raise self._refusal(f"makes too few different prompts: none was found for the split {split}")

    def _entry(self, position: int) -> dict[str, Any]:
        try:
            return self._dataset[position]
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise self._refusal(f"cannot make a prompt: {type(error).__name__}: {error}") from None

    def _text(self, entry: dict[str, Any]) -> str:
        return "\n".join(filter(None, (entry["question"], self._settings.instruction)))

    def _solution(self, entry: dict[str, Any]) -> str:
        if entry["answer"] is None:
            raise self._refusal("has no references to show as examples: set task.examples=0")
        return f"<answer>{entry['answer']}</answer>"

    def _json(self, entry: dict[str, Any]) -> str:
        # A few datasets note fractions and the like beside their references.
        return json.dumps(
            {"dataset": self._settings.dataset, "options": self._settings.options, "entry": entry}, default=str
        )

    def _check_judge(self, entry: dict[str, Any]) -> None:
        """Refuse a dataset whose judge needs what JSON cannot carry: it would call right completions wrong."""
        if isinstance(answer := entry["answer"], str):
            marks = self._dataset.score_answer(answer, entry)
            if marks != self._dataset.score_answer(answer, json.loads(self._json(entry))["entry"]):
                raise self._refusal("is judged by values that do not fit into JSON")

    def _refusal(self, why: str) -> ConfigError:
        given = f"task.dataset={self._settings.dataset} with task.options={self._settings.options}"
        return ConfigError(f"{given} {why}; choose another task.dataset or other task.options")


def open_dataset(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """The generator and judge that reasoning-gym knows under `name`; ConfigError when the options do not fit it."""
    known = gym.factory.DATASETS
    if name not in known:
        raise ConfigError(f"task.dataset={name} is not one of reasoning-gym's: {did_you_mean(name, known)}")
    fields = {field.name for field in dataclasses.fields(known[name][1])} - {"seed", "size"}  # these two are the run's
    for option in options:
        if option not in fields:
            meant = did_you_mean(option, fields, prefix="task.options.")
            raise ConfigError(f"unknown key task.options.{option} of task.dataset={name}: {meant}")
    try:
        return gym.create_dataset(name, seed=seed, size=SIZE, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.options={dict(options)} do not fit task.dataset={name}: {error}") from None


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 if reasoning-gym gives full marks, else 0."""
    return float(_marks(completion, answer) == 1)


def graded_reward(prompt: str, completion: str, answer: str) -> dict[str, float]:
    """A little for an answer between its tags, the rest by reasoning-gym's marks; 1 only for full marks."""
    marks = _marks(completion, answer)
    return {"format": FORMAT_SHARE * (marks is not None), "marks": (1 - FORMAT_SHARE) * (marks or 0.0)}


def _marks(completion: str, answer: str) -> float | None:
    """reasoning-gym's, from 0 to 1, for the last answer between tags; None when there is none."""
    given = gym.utils.extract_answer(completion)
    if not given:
        return None
    question = msgspec.json.decode(answer, type=Question)
    judge = _judge(question.dataset, msgspec.json.encode(question.options))
    return float(judge.score_answer(given, question.entry))


@lru_cache(maxsize=16)
def _judge(dataset: str, options: bytes) -> Any:
    return open_dataset(dataset, msgspec.json.decode(options), seed=0)
