"""OpenAI responses. Names and meaning of the fields are OpenAI's; what is not here is ignored."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from asyncrl.chat import Message
from asyncrl.gateway.call import (
    FORCED_FORM,
    FORCED_TOOLS,
    TEXT_ALONE,
    Answers,
    Call,
    Event,
    History,
    check_max_tokens,
    function_tool,
    invalid,
    token_logprobs,
    unsupported,
)

LOGPROBS = "message.output_text.logprobs"


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


class Item(msgspec.Struct):
    """Of any kind; each has the fields of its own."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Form(msgspec.Struct):
    type: str = "text"


class Text(msgspec.Struct):
    format: Form | None = None


class Responses(msgspec.Struct, kw_only=True):
    input: str | list[Item] = []
    model: str = "policy"
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: Text | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    conversation: Any = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def call(self, history: History) -> Call:
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", FORCED_TOOLS)
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            raise unsupported("text.format", FORCED_FORM)
        if self.top_logprobs:
            raise unsupported("top_logprobs", "the engine returns the log-probability of the sampled token alone")
        if self.conversation is not None:
            raise unsupported("conversation", "send the whole input, or previous_response_id")
        if self.background:
            raise unsupported("background", "a call is answered when it is sampled")
        said = self._said(history)
        if not said:
            raise invalid("input", "it is empty")
        instructions: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Call(
            messages=instructions + said,
            tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())),
            tool_calls=self.tool_choice != "none",
            options=self.chat_template_kwargs,
            max_tokens=check_max_tokens("max_output_tokens", self.max_output_tokens),
        )

    def _said(self, history: History) -> list[Message]:
        """Without the instructions, which are those of one response alone."""
        earlier = self.previous_response_id
        if earlier is not None and earlier not in history:
            raise invalid("previous_response_id", f"{earlier} is no response of this episode, or was not stored")
        return (history.messages(earlier) if earlier is not None else []) + self._new()

    def _new(self) -> list[Message]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _read(self.input)

    def response(self, answers: Answers, history: History) -> Any:
        answer = answers.choices[0]
        cut_off = answer.finish == "length"
        found = self._head(answers, "incomplete" if cut_off else "completed")
        if self.store is not False:
            history.add(found["id"], self.previous_response_id, [*self._new(), answer.reply.message()])
        found["incomplete_details"] = {"reason": "max_output_tokens"} if cut_off else None
        found["output"] = self._items(answers)
        found["usage"] = _usage(answers)
        return found

    def events(self, answers: Answers, history: History) -> Iterator[Event]:
        number = count()

        def event(kind: str, **fields: Any) -> Event:
            return Event(kind, {"type": kind, "sequence_number": next(number)} | fields)

        begun = self._head(answers, "in_progress") | {"output": [], "usage": None, "incomplete_details": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        done = self.response(answers, history)
        for index, item in enumerate(done["output"]):
            at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
            yield event("response.output_item.added", output_index=index, item=_begun(item))
            if item["type"] == "function_call":
                yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                yield event(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
                )
            else:
                at["content_index"], part = 0, item["content"][0]
                kind = f"response.{part['type']}"
                logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield event("response.content_part.added", **at, part=part | {"text": ""})
                yield event(f"{kind}.delta", **at, delta=part["text"], **logprobs)
                yield event(f"{kind}.done", **at, text=part["text"], **logprobs)
                yield event("response.content_part.done", **at, part=part)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{done['status']}", response=done)

    def _head(self, answers: Answers, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{answers.id}",
            "object": "response",
            "created_at": int(answers.created),
            "status": status,
            "error": None,
            "instructions": self.instructions,
            "metadata": {},
            "model": self.model,
            "parallel_tool_calls": True,
            "previous_response_id": self.previous_response_id,
            "temperature": None,
            "tool_choice": self.tool_choice or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in self.tools or ()],
            "top_p": None,
        }

    def _items(self, answers: Answers) -> list[dict[str, Any]]:
        answer, items = answers.choices[0], list[dict[str, Any]]()
        reply, status = answer.reply, "incomplete" if answer.finish == "length" else "completed"
        if reply.reasoning:
            part = {"type": "reasoning_text", "text": reply.reasoning}
            items.append({"id": f"rs_{answers.id}", "type": "reasoning", "summary": [], "content": [part]})
        if reply.content or not reply.tool_calls:
            logprobs = token_logprobs(answer, answers.decode) if LOGPROBS in (self.include or ()) else []
            part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": logprobs}
            head = {"id": f"msg_{answers.id}", "type": "message", "role": "assistant"}
            items.append(head | {"content": [part]})
        for i, call in enumerate(reply.tool_calls):
            head = {"id": f"fc_{answers.id}_{i}", "type": "function_call", "call_id": call.id, "name": call.name}
            items.append(head | {"arguments": call.arguments})
        return [item | {"status": status} for item in items]


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item before anything is in it."""
    return item | {"status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {"content": []})


def _read(items: list[Item]) -> list[Message]:
    """Messages; the reasoning, text and calls of one reply come as items behind one another."""
    found = list[Message]()
    reply: Message | None = None
    for i, item in enumerate(items):
        field = f"input[{i}]"
        match item.type:
            case "reasoning":
                parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
                reply = {"role": "assistant", "content": "", "reasoning_content": "".join(part.text for part in parts)}
                found.append(reply)
            case "message" if item.role == "assistant":
                if reply is None or reply["content"] or "tool_calls" in reply:
                    reply = {"role": "assistant", "content": ""}
                    found.append(reply)
                reply["content"] = _text(item.content, field)
            case "function_call":
                if reply is None:
                    reply = {"role": "assistant", "content": ""}
                    found.append(reply)
                function = {"name": item.name, "arguments": item.arguments}
                reply.setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "function", "function": function}
                )
            case "function_call_output":
                reply = None
                told = _text(item.output, field)
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": told})
            case "message" if item.role in ("user", "system", "developer"):
                reply = None
                found.append({"role": item.role, "content": _text(item.content, field)})
            case "message":
                raise invalid(f"{field}.role", f"{item.role!r} is none of user, assistant, system and developer")
            case kind:
                raise unsupported(f"{field}.type", f"{kind}: only messages, reasoning and function calls are")
    return found


def _text(content: str | list[Part] | None, field: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content or ()):
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise unsupported(f"{field}.content[{i}].type", f"{part.type}: {TEXT_ALONE}")
    return "".join(part.text or part.refusal for part in content or ())


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type != "function":
        raise unsupported(f"{field}.type", f"{tool.type}: only functions are")
    return function_tool(tool.name, tool.description, tool.parameters)


def _usage(answers: Answers) -> dict[str, Any]:
    sampled = answers.sampled_tokens
    return {
        "input_tokens": answers.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answers.prompt_tokens + sampled,
    }
