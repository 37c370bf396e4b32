"""Conversations for a model without a chat template, such as the quickstart's: contents one behind the other."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.chat.format import ChatFormat
from asyncrl.chat.messages import Message, Reply, SaidTurn, Tools
from asyncrl.data.tokenizer import Tokenizer
from asyncrl.errors import ChatError, ConfigError

NOTHING: Mapping[str, Any] = {}


class PlainFormat:
    """As `ChatFormat`, without roles, tools or reasoning. The model's turns end with its end token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(
        self, messages: Sequence[Message], tools: Tools = (), *, options: Mapping[str, Any] = NOTHING
    ) -> list[int]:
        if tools:
            raise ChatError("the call has tools, and the model has no chat template to show them in: leave them out")
        return [*self._tokenizer.encode(""), *self._ids(messages)]

    def said_turns(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        of: Collection[int],
        options: Mapping[str, Any] = NOTHING,
    ) -> Iterator[SaidTurn]:
        for number in sorted(of):
            yield SaidTurn(self.encode(messages[:number], tools), self._ids(messages[number : number + 1]))

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Tools,
        kept: int,
        after: int,
        *,
        options: Mapping[str, Any] = NOTHING,
    ) -> list[int] | None:
        ends = self._tokenizer.eos_ids
        closing = [] if after in ends else ends[:1]  # a reply that was cut off is over all the same
        return [*closing, *self._ids(messages[kept:])]

    def parse(
        self, ids: Sequence[int], tools: Tools | None = None, *, prompt: Sequence[int] | None = None, call: int = 0
    ) -> Reply:
        said = ids[:-1] if ids and ids[-1] in self._tokenizer.eos_ids else ids
        return Reply(self._tokenizer.decode(said))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            try:
                ids += self._tokenizer.encode_rendered(text)
            except Exception as error:  # `tokenizers` raises nothing narrower for text that the model has no token for
                raise ChatError(f"{text!r:.200} cannot be written in the model's tokens: {error}") from None
            if message["role"] == "assistant":
                ids.append(self._tokenizer.eos_ids[0])
        return ids


def chat_format(tokenizer: Tokenizer, tool_format: str = "") -> ChatFormat | PlainFormat:
    """Of a model: its chat template's, if it has one."""
    if tokenizer.has_chat_template:
        return ChatFormat(tokenizer, tool_format)
    if tool_format:
        raise ConfigError(f"agent.tool_format={tool_format}: the model has no chat template; leave it out")
    return PlainFormat(tokenizer)
