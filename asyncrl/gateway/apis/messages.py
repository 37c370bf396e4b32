"""Anthropic messages. Names and meaning of the fields are Anthropic's; what is not here is ignored."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from asyncrl.chat import Message
from asyncrl.gateway.call import (
    FORCED_TOOLS,
    TEXT_ALONE,
    Answers,
    Call,
    Event,
    History,
    check_max_tokens,
    function_tool,
    invalid,
    unsupported,
)


class Block(msgspec.Struct):
    """Of any kind; each has the fields of its own."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class ChatMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Kind(msgspec.Struct):
    type: str


class Prompt(msgspec.Struct, kw_only=True):
    """What is counted by `count_tokens`."""

    messages: list[ChatMessage]
    model: str = "policy"
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: Kind | None = None
    thinking: Kind | None = None

    def call(self, history: History) -> Call:
        if not self.messages:
            raise invalid("messages", "there are none")
        if self.tool_choice is not None and self.tool_choice.type not in ("auto", "none"):
            raise unsupported("tool_choice", FORCED_TOOLS)
        system = _text(self.system or "", "system")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{i}]")
        return Call(
            messages=messages,
            tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())),
            tool_calls=self.tool_choice is None or self.tool_choice.type != "none",
        )


class Messages(Prompt, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def call(self, history: History) -> Call:
        return msgspec.structs.replace(
            super().call(history),
            max_tokens=check_max_tokens("max_tokens", self.max_tokens),
            stop=tuple(filter(None, self.stop_sequences or ())),
        )

    def response(self, answers: Answers, history: History) -> Any:
        return self._head(answers) | {"content": self._blocks(answers)} | _end(answers) | {"usage": _usage(answers)}

    def events(self, answers: Answers, history: History) -> Iterator[Event]:
        begun = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answers) | {"output_tokens": 0},
        }
        yield _event("message_start", message=self._head(answers) | begun)
        for index, block in enumerate(self._blocks(answers)):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_end(answers), usage=_usage(answers))
        yield _event("message_stop")

    def _head(self, answers: Answers) -> dict[str, Any]:
        return {"id": f"msg_{answers.id}", "type": "message", "role": "assistant", "model": self.model}

    def _blocks(self, answers: Answers) -> list[dict[str, Any]]:
        reply, blocks = answers.choices[0].reply, list[dict[str, Any]]()
        if reply.reasoning and self.thinking is not None and self.thinking.type != "disabled":
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": answers.id})
        if reply.content or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.content, "citations": None})
        for call in reply.tool_calls:
            arguments = msgspec.json.decode(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return blocks


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, {"type": kind} | fields)


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what then comes."""
    match block["type"]:
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return block | {"thinking": "", "signature": ""}, deltas
        case "tool_use":
            text = msgspec.json.encode(block["input"]).decode()
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case _:
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _end(answers: Answers) -> dict[str, Any]:
    answer = answers.choices[0]
    if answer.stop is not None:
        reason = "stop_sequence"
    elif answer.finish == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if answer.reply.tool_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answers: Answers) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answers.prompt_tokens, "output_tokens": answers.sampled_tokens} | cached


def _messages(message: ChatMessage, field: str) -> list[Message]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_reply(message.content, field)]
    found, text = list[Message](), list[Block]()
    for i, block in enumerate(message.content):
        if block.type == "tool_result":
            found += _said(message.role, text, field)
            text = []
            told = _text(block.content or "", f"{field}.content[{i}]")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": told})
        else:
            text.append(block)
    return found + _said(message.role, text, field)


def _said(role: str, blocks: Sequence[Block], field: str) -> list[Message]:
    return [{"role": role, "content": _text(blocks, field)}] if blocks else []


def _reply(blocks: Sequence[Block], field: str) -> Message:
    text = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    found: Message = {"role": "assistant", "content": _text(text, field)}
    if reasoning := "".join(block.thinking for block in blocks):
        found["reasoning_content"] = reasoning
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    return found | {"tool_calls": calls} if calls else found


def _text(content: str | Sequence[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            raise unsupported(f"{field}.content[{i}].type", f"{block.type}: {TEXT_ALONE}")
    return "".join(block.text for block in content)


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{field}.type", f"{tool.type}: only tools of your own are")
    return function_tool(tool.name, tool.description, tool.input_schema)
