"""A row of a table as turns of the model's, in its own tokens.

{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "tools": [...]}
{"prompt": "1+1=", "completion": "2"}

Prompt and completion may be messages as well. Texts are shown as those of rollouts are: with `rollout.chat` as turns of
the chat template, else one behind the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from asyncrl.chat import Message, chat_format
from asyncrl.chat.messages import SaidTurn
from asyncrl.config import Rollout
from asyncrl.config.errors import did_you_mean
from asyncrl.config.sft import Sft
from asyncrl.data.tokenizer import Tokenizer
from asyncrl.types import Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
Row = Mapping[str, Any]


def columns(settings: Sft, known: Sequence[str]) -> list[str]:
    """Those to read, or ValueError with those that exist."""
    tools = [settings.tools] if settings.tools in known else []
    if settings.messages in known:
        return [settings.messages, *tools]
    wanted = [settings.prompt, settings.completion]
    if lacking := [name for name in wanted if name not in known]:
        meant = did_you_mean(settings.messages if len(lacking) == 2 else lacking[0], known)
        raise ValueError(
            f"no column {settings.messages!r}, and none {' and '.join(map(repr, lacking))}: {meant}; set sft.messages, "
            f"or sft.prompt and sft.completion, to columns among {', '.join(sorted(known))}"
        )
    return [*wanted, *tools]


class Conversations:
    """Rows to turns, for one model."""

    def __init__(self, settings: Sft, tokenizer: Tokenizer, rollout: Rollout) -> None:
        self._settings, self._tokenizer, self._rollout = settings, tokenizer, rollout
        self._format = chat_format(tokenizer)

    def turns(self, row: Row, uid: str) -> list[SaidTurn]:
        """What is trained on, or ValueError with what is wrong with the row."""
        settings = self._settings
        columns(settings, list(row))
        tools = _tools(row.get(settings.tools), settings.tools)
        if settings.messages in row:
            return self._of_chat(_messages(row[settings.messages], settings.messages), tools)
        prompt, completion = _decoded(row[settings.prompt]), _decoded(row[settings.completion])
        if isinstance(prompt, str) and isinstance(completion, str) and not self._rollout.chat:
            return [self._of_text(prompt, completion, uid)]
        system = [{"role": "system", "content": self._rollout.system}] if self._rollout.system else []
        before = [*system, _message("user", prompt)] if isinstance(prompt, str) else _messages(prompt, settings.prompt)
        said = completion if isinstance(completion, str) else _messages(completion, settings.completion)
        after = [_message("assistant", said)] if isinstance(said, str) else said
        return self._of_chat([*before, *after], tools, first=len(before))

    def _of_chat(self, messages: Sequence[Message], tools: Any, first: int = 0) -> list[SaidTurn]:
        """Trained on are the assistant's messages from number `first` on."""
        said = [
            number
            for number, message in enumerate(messages)
            if number >= first and message["role"] == "assistant" and message.get("weight") != 0
        ]
        if not said:
            raise ValueError("no message is the assistant's, so there is nothing to train on")
        shown = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        return list(self._format.said_turns(shown, tools, of=said[-1:] if self._settings.train_on == "last" else said))

    def _of_text(self, prompt: str, completion: str, uid: str) -> SaidTurn:
        """The prompt as rollouts have it, and what the tokenizer makes of the rest of both together."""
        given = self._tokenizer.encode_prompt(Prompt(uid=uid, text=prompt), self._rollout)
        alone, whole = self._ids(prompt), self._ids(prompt + completion)
        said = whole[len(alone) :] if whole[: len(alone)] == alone else self._ids(completion)
        ends = self._tokenizer.eos_ids
        return SaidTurn(given, said if said and said[-1] in ends else [*said, ends[0]])

    def _ids(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_rendered(text)
        except Exception as error:  # `tokenizers` raises nothing narrower for text that the model has no token for
            raise ValueError(f"{text!r:.200} cannot be written in the model's tokens: {error}") from None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _decoded(value: Any) -> Any:
    """Messages are often stored as JSON."""
    if not (isinstance(value, str) and value.lstrip()[:1] == "["):
        return value
    try:
        found = msgspec.json.decode(value, type=list[dict[str, Any]])
    except msgspec.DecodeError:  # a text that begins so
        return value
    return found or value


def _tools(given: Any, column: str) -> list[Mapping[str, Any]]:
    """These too."""
    try:
        return msgspec.convert(msgspec.json.decode(given or "[]") if isinstance(given, str) else given or [], list[Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{column} is {given!r:.200}, and not a list of tools: {error}") from None


def _messages(given: Any, column: str) -> list[Message]:
    given = _decoded(given)
    messages = cast(list[Any], given) if isinstance(given, list) else []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or cast(Row, message).get("role") not in ROLES:
            raise ValueError(
                f"message {number} of {column} is {message!r:.200}: each has a role, one of {', '.join(ROLES)}, and a "
                "content"
            )
    if not messages:
        raise ValueError(
            f"{column} is {given!r:.200}, and not a list of messages such as "
            '[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]'
        )
    return messages
