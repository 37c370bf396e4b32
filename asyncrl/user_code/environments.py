"""The contract of an environment.

    def environment(prompt: str, turns: list[str], answer: str) -> str | None

`turns` are the model's and the environment's in alternation and end with the model's. What is returned is given to the
model, which then goes on; None ends the conversation. A function of the conversation alone needs no session that could
be lost: a conversation that another engine goes on with, after a death or a resumption, is simply asked about again.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.drop_reasons import DropReason
from asyncrl.user_code.protocol import RewardFailure, attempt


class Conversation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The arguments of one call."""

    prompt: str
    turns: tuple[str, ...]
    answer: str


def respond(function: Callable[..., Any], talk: Conversation) -> str | RewardFailure | None:
    said = attempt("environment", function, talk.prompt, list(talk.turns), talk.answer)
    if said is None or isinstance(said, RewardFailure) or (isinstance(said, str) and said):
        return said
    message = f"returned {said!r:.200}; an environment returns the text to give to the model, or None at the end"
    return RewardFailure(DropReason.ENVIRONMENT_INVALID, message)
