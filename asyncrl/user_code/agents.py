"""The contract of an agent harness.

    def agent(prompt: str, answer: str, access: Access) -> str | float | dict | Score | Outcome | None

It plays one episode: it samples from the policy with any client of the OpenAI or Anthropic API, calls its tools, and
returns when the episode is over. It may be `async`.

    a text       the result, which the reward function gets as the completion
    None         the same with the last turn of the model
    a number, a dict of numbers or a Score: the reward itself; the reward function is not called
    an Outcome   either of these, with rewards of single turns

A program gets a line of JSON on stdin (`prompt`, `answer`, `url`, `anthropic_url`, `key`) and the variables that the
clients read (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY). What it prints is the result.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.data.reward_parts import finite
from asyncrl.drop_reasons import DropReason
from asyncrl.user_code.protocol import RewardFailure, attempt, describe, whole_text
from asyncrl.user_code.score import RULE, Score, read_score

MAX_RESULT = 1 << 20
"""Characters of a result."""


class Access(msgspec.Struct, frozen=True):
    """What a harness needs to sample in its episode."""

    url: str
    """`base_url` of OpenAI clients."""
    key: str
    model: str = "policy"
    """The name under which the policy is served; any other is accepted."""

    @property
    def anthropic_url(self) -> str:
        """`base_url` of Anthropic clients, which add the `v1` themselves."""
        return self.url.removesuffix("/v1")


class Outcome(msgspec.Struct, frozen=True):
    """How an episode ended."""

    result: str | None = None
    """For the reward function; None: the last turn of the model."""
    reward: float | dict[str, float] | Score | None = None
    """The reward itself, in place of the reward function's."""
    turn_rewards: tuple[float, ...] = ()
    """Of each call of the model, in the order in which they were answered; empty: none has one of its own. Calls that
    were answered without a token, because all were used up, may be left out."""


class EpisodeResult(msgspec.Struct, frozen=True, tag=True):
    """A checked outcome."""

    text: str | None = None
    reward: Score | None = None
    turn_rewards: tuple[float, ...] = ()


class Task(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of one call."""

    episode: str
    prompt: str
    answer: str
    access: Access


class Ended(msgspec.Struct, frozen=True, tag=True):
    """What a worker says of an episode that is over."""

    episode: str
    result: EpisodeResult | RewardFailure


def play(function: Callable[..., Any], task: Task) -> EpisodeResult | RewardFailure:
    """Call it in this thread, which whatever it raises must not end: nobody would hear of the episode any more."""
    try:
        return read_outcome(attempt("agent", function, task.prompt, task.answer, task.access))
    except SystemExit as end:  # a script that ends itself
        return failure(f"it called sys.exit({end.code!r})")
    except BaseException as error:  # asyncio's CancelledError is one, and the result may raise when it is read
        return failure(*describe(error))


def failure(message: str, source: str = "") -> RewardFailure:
    return RewardFailure(DropReason.AGENT_ERROR, message, source)


def read_outcome(value: Any) -> EpisodeResult | RewardFailure:
    """What a harness returned, checked: nobody knows what it put there."""
    if isinstance(value, RewardFailure):
        return value
    outcome = value if isinstance(value, Outcome) else _outcome(value)
    if outcome is None or (found := _checked(outcome)) is None:
        message = f"returned {value!r:.200}; a harness returns a text, None, a reward or an Outcome of these: {RULE}"
        return RewardFailure(DropReason.AGENT_INVALID, message)
    return found


def _outcome(value: Any) -> Outcome | None:
    if value is None or isinstance(value, str):
        return Outcome(result=value)
    return None if (score := read_score(value)) is None else Outcome(reward=score)


def _checked(found: Outcome) -> EpisodeResult | None:
    text: Any = found.result
    score = None if found.reward is None else read_score(found.reward)
    rewards = [finite(each) for each in found.turn_rewards]
    wrong = (found.reward is not None and score is None) or None in rewards
    if wrong or not (text is None or (isinstance(text, str) and len(text) <= MAX_RESULT)):
        return None
    return EpisodeResult(text and whole_text(text), score, tuple(each for each in rewards if each is not None))
