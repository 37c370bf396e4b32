"""A language model as judge, beside the reward function or in its place: who is asked, what, and at what cost.

A rubric item is a text, or an `Item` with points and a weight:

    rubric: {correct: "Is the final answer right?", clear: {ask: "How clear is it?", points: 5, weight: 0.5}}
"""

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from asyncrl.config.base import AboveZero, Natural, NonNegative, Positive, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run

NAME = re.compile(r"[a-z0-9_]{1,34}")
"""Of an item: with `judge_` before it, it has to be the name of a part of the reward."""
MOST_ITEMS = 16
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_FIELDS = ("model", "messages", "stream", "n")
"""Of the request: `options` may not set them."""


class Item(Settings, frozen=True):
    """One thing that the judge is asked about each completion."""

    ask: str
    points: Positive = 1
    """1: it is answered with yes or no; more: with a grade from 0 to so many."""
    weight: AboveZero = 1.0
    """In the judge's score, relative to the other items."""


class Judge(Settings, frozen=True):
    """A model that is asked over HTTP, in the wire format of OpenAI's chat completions (docs/judges.md)."""

    RETURNS: ClassVar[str] = "a chat completion whose text answers every item of the rubric, as JSON"
    """For whoever reads that it did not."""

    url: str = ""
    """Where `/chat/completions` is, such as http://localhost:8000/v1; empty: there is no judge."""
    model: str = ""
    """The name that the server knows it by."""
    api_key_env: str = ""
    """Environment variable with the key, where the server wants one. The key itself is written nowhere."""
    template: str = ""
    """What the judge reads: a text with {completion}, and {prompt}, {answer}, {turns}, {rubric} where they are wanted,
    or the path of a file with such a text; empty: ours. With `pairs` it has {first} and {second} for {completion}."""
    rubric: dict[str, Item | str] = msgspec.field(default_factory=dict[str, Item | str])
    """By name, what it is asked. Each is recorded as a part of the reward, `judge_NAME`, in its own points."""
    weight: NonNegative = 1.0
    """The judge's score is the weighted mean of its items, between 0 and 1. So often it is added to the function's
    reward; 0: it is only recorded."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Further fields of each request, such as {temperature: 0, max_tokens: 500}."""
    pairs: Natural = 0
    """Compare each completion with so many others of its group, instead of judging it alone: the judge is shown two, in
    both orders, and says for each item which is better. The grade is the share of wins, between 0 and 1."""
    concurrency: Positive = 32
    """Completions, or comparisons, that are with the judge at a time."""
    timeout_s: AboveZero = 60.0
    """For one call; after it the call is given up, and tried again."""
    deadline_s: AboveZero = 240.0
    """For one completion, with all its calls and waits; after it the sample is dropped and counted."""
    retries: Natural = 5
    """Of calls that fail or give no verdict. Being asked to wait (429, or Retry-After) is none."""
    backoff_s: AboveZero = 1.0
    """Before the first retry; each further one waits twice as long, up to 30 s, give or take a half."""
    max_calls: Natural = 0
    """Of the whole run, resumed or not; 0: any number."""
    max_tokens: Natural = 0
    """Of the whole run, read and written ones; 0: any number."""
    when_spent: Literal["stop", "drop"] = "stop"
    """When one of the two is used up: end the run, or drop every sample that would need another call."""
    cache_bytes: Natural = 256 << 20
    """Verdicts that are kept in the run's directory, so that nothing is asked twice; the oldest go first. 0: none."""

    @property
    def on(self) -> bool:
        return bool(self.url)

    @property
    def field(self) -> str:
        return "reward.judge.url"

    @property
    def value(self) -> str:
        return self.url

    @property
    def expected(self) -> str:
        return f"POST {self.address} with model={self.model} and messages, as OpenAI has it"

    @property
    def address(self) -> str:
        return f"{self.url.rstrip('/')}/chat/completions"

    @property
    def items(self) -> dict[str, Item]:
        """The rubric, each item with points and weight."""
        return {name: Item(ask=item) if isinstance(item, str) else item for name, item in self.rubric.items()}


def check_judge(run: "Run") -> None:
    judge = run.reward.judge
    if not judge.on:
        if judge != Judge():
            raise ConfigError("reward.judge.* is set and reward.judge.url is not: name the server, or leave it out")
        if not run.reward.function:
            raise ConfigError(
                "reward.function is empty, and there is no reward.judge.url that could judge in its place: set one"
            )
        return
    _check_url(judge.url)
    if not judge.model:
        raise ConfigError(
            f"reward.judge.url={judge.url} needs reward.judge.model, the name that the server knows its model by"
        )
    if judge.api_key_env and not VARIABLE.fullmatch(judge.api_key_env):
        # Perhaps it is the key itself, so the value is not repeated.
        raise ConfigError(
            "reward.judge.api_key_env is no name of an environment variable: write the key into one, and give its "
            "name, such as reward.judge.api_key_env=OPENAI_API_KEY"
        )
    if taken := [name for name in judge.options if name in OWN_FIELDS]:
        raise ConfigError(f"reward.judge.options.{taken[0]} is set for each call by the run itself: leave it out")
    if judge.deadline_s < judge.timeout_s:
        raise ConfigError(
            f"reward.judge.deadline_s={judge.deadline_s:g} ends every call before reward.judge.timeout_s="
            f"{judge.timeout_s:g} does: raise it, or lower reward.judge.timeout_s"
        )
    _check_rubric(judge)
    if judge.pairs:
        _check_pairs(run, judge)


def _check_pairs(run: "Run", judge: Judge) -> None:
    others = run.rollout.group_size - 1
    if judge.pairs > others:
        raise ConfigError(
            f"reward.judge.pairs={judge.pairs} is more than the {others} others that a completion has with "
            f"rollout.group_size={run.rollout.group_size}: lower it, or sample larger groups"
        )
    if judge.pairs % 2 and judge.pairs != others:
        raise ConfigError(
            f"reward.judge.pairs={judge.pairs} is odd, and each completion is compared with as many before it as after "
            f"it: set {judge.pairs + 1}, or all {others} others of its group"
        )
    if graded := [name for name, item in judge.items.items() if item.points != 1]:
        raise ConfigError(
            f"reward.judge.rubric.{graded[0]}.points={judge.items[graded[0]].points}: with reward.judge.pairs an item "
            "has a winner and no points; leave them out, and give it more weight instead"
        )
    if not run.reward.function and run.evaluation.prompts:
        raise ConfigError(
            f"reward.judge.pairs={judge.pairs} compares completions of one group, and held-out completions have none; "
            "set reward.function to what they are measured by, or evaluation.prompts=0"
        )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ConfigError("reward.judge.url is no address: give one such as http://localhost:8000/v1") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"reward.judge.url with a user, a password or a query (host {parts.hostname}) would be written down with "
            "the run: give the address alone, and a key by reward.judge.api_key_env"
        )
    if not sound:
        raise ConfigError(f"reward.judge.url={url} is no address: give one such as http://localhost:8000/v1")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(
            f"reward.judge.url={url}: /chat/completions is added to it; give reward.judge.url="
            f"{url.rstrip('/').removesuffix('/chat/completions')}"
        )


def _check_rubric(judge: Judge) -> None:
    if not judge.rubric:
        raise ConfigError(
            "reward.judge.rubric is empty: say what the judge is asked, such as "
            "reward.judge.rubric.correct='Is the final answer right?'"
        )
    if len(judge.rubric) > MOST_ITEMS:
        raise ConfigError(f"reward.judge.rubric has {len(judge.rubric)} items; at most {MOST_ITEMS} are possible")
    for name, item in judge.items.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"reward.judge.rubric.{name}: a name has up to 34 small letters, digits and _")
        if not item.ask.strip():
            raise ConfigError(f"reward.judge.rubric.{name} asks nothing: write the question")
