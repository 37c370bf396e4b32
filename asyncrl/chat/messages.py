"""Messages in the form of OpenAI's chat completions, and as chat templates want them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from asyncrl.errors import ChatError

Message = dict[str, Any]
"""role, content (a text), reasoning_content, tool_calls, tool_call_id, name."""
Tools = Sequence[Mapping[str, Any]]
"""Each {"type": "function", "function": {"name", "description", "parameters"}}."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Clients and templates do not agree on a name; transformers reads the same three."""


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model calls."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, as the model wrote it."""


class Reply(msgspec.Struct, frozen=True):
    """What the model said in one turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """The same as a message of the history."""
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return found


class SaidTurn(NamedTuple):
    """A turn of the model's in a conversation that somebody else wrote."""

    prompt: list[int]
    """Ids of all before it, as the model is called with."""
    reply: list[int]
    """What the model should say to it, its end token included."""


def for_template(message: Mapping[str, Any], id_length: int = 0) -> Message:
    """A message without what is empty, its content a text, arguments of calls as objects: what templates are written
    for, and what servers such as vLLM hand them. Ids of calls get `id_length`, if it is not 0."""
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = _text(found.get("content", ""))
    reasoning = next((found[name] for name in REASONING_FIELDS if found.get(name)), None)
    for name in REASONING_FIELDS:
        found.pop(name, None)
    if reasoning is not None:
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls := found.pop("tool_calls", ()):
        found["tool_calls"] = [_with_parsed_arguments(call, id_length) for call in calls]
    if "tool_call_id" in found:
        found["tool_call_id"] = _sized(found["tool_call_id"], id_length)
    return found


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if other := [part.get("type") for part in content if part.get("type") != "text"]:
        raise ChatError(f"a message has content of the type {other[0]!r}; the policy reads text only")
    return "".join(part["text"] for part in content)


def _with_parsed_arguments(call: Mapping[str, Any], id_length: int) -> Message:
    function = call["function"]
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None  # a harness may send back anything: the template shows it as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "id": _sized(call.get("id", ""), id_length), "function": {**function, "arguments": arguments}}


def _sized(call_id: str, length: int) -> str:
    return call_id if length in (0, len(call_id)) else short_id(call_id, length)


def short_id(text: str, length: int = 9) -> str:
    """Letters and digits that stand for a text, always the same. Nine are what Mistral's templates ask for."""
    return xxhash.xxh3_128_hexdigest(text.encode())[:length]
