"""Calls of the user's code, in a worker or in a thread: whatever it does short of ending the process is a result."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from asyncrl.drop_reasons import DropReason, UserFunction
from asyncrl.errors import AsyncRLError
from asyncrl.system.user_functions import raised_at
from asyncrl.user_code.score import Score

# What is asked of a reward function and what comes back, in the parent and on the wire to its worker.


class RewardInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The arguments of one call."""

    prompt: str
    completion: str
    answer: str
    turns: tuple[str, ...] = ()
    """The whole conversation, where there is an environment; `completion` is the model's last turn then."""


class RewardFailure(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A sample without a reward: it is dropped and counted under its reason."""

    reason: str
    """As `asyncrl.drop_reasons` has them."""
    message: str
    source: str = ""
    """The line of the user's file where an exception was raised."""


class RewardStats(msgspec.Struct, kw_only=True):
    """Counters since start."""

    judged: int = 0
    busy_seconds: float = 0.0
    """In which workers judged, added up over the workers."""
    waited_seconds: float = 0.0
    """From being handed over to the reward, added up over the samples: waiting for a worker and being judged."""

    def add(self, samples: int, came: float, begun: float, ended: float) -> None:
        """A share that came, was begun by a worker and ended at these moments."""
        self.judged += samples
        self.busy_seconds += ended - begun
        self.waited_seconds += samples * (ended - came)


ALLOW_UNSAFE_EXEC = "ASYNCRL_ALLOW_UNSAFE_EXEC"
"""In a worker's environment: programs may run outside a sandbox. It is there by reward.allow_unsafe_exec alone."""
REWARD_MODEL = "ASYNCRL_REWARD_MODEL"
"""In a worker's environment: `DEVICE|DIRECTORY` of reward.model, for `asyncrl.rewards.model`."""
RewardResult = float | Score | RewardFailure
"""A number where the reward has no parts."""


MAX_MESSAGE = 1000
"""Characters of a failure's message that are kept."""


def attempt(kind: UserFunction, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call returns, awaited if it has to be, or why it failed."""
    try:
        value = function(*args, **kwargs)
        return asyncio.run(value) if isinstance(value, Coroutine) else value
    except Exception as error:  # the user's code may raise anything
        message, source = describe(error)
        return RewardFailure(DropReason.of_function(kind, "error"), message, source)


def describe(error: BaseException) -> tuple[str, str]:
    """One line, with the place if it lies in the user's code, and the line of code there."""
    if isinstance(error, AsyncRLError):
        return str(error)[:MAX_MESSAGE], ""
    place, source = raised_at(error)
    words = whole_text(" ".join(f"{type(error).__name__}: {error}".split()))
    return words[:MAX_MESSAGE] + (f" ({place})" if place else ""), source


def whole_text(text: str) -> str:
    """The same, with surrogates in pairs as the character that they are, and others replaced: these have no UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
