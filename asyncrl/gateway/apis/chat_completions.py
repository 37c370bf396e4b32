"""OpenAI chat completions. Names and meaning of the fields are OpenAI's; what is not here is ignored."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from asyncrl.chat import Message
from asyncrl.gateway.call import (
    FORCED_FORM,
    FORCED_TOOLS,
    MAX_CHOICES,
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
from asyncrl.gateway.record import Answer


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


class Function(msgspec.Struct):
    name: str
    arguments: str = ""


class WrittenCall(msgspec.Struct):
    function: Function
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[WrittenCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str
    function: FunctionTool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Form(msgspec.Struct):
    type: str = "text"


class ChatCompletion(msgspec.Struct, kw_only=True):
    messages: list[ChatMessage]
    model: str = "policy"
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Form | None = None
    functions: Any = None
    chat_template_kwargs: dict[str, Any] = {}

    def call(self, history: History) -> Call:
        if not self.messages:
            raise invalid("messages", "there are none")
        if self.functions:
            raise unsupported("functions", "it is the old name of tools")
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", FORCED_TOOLS)
        if self.response_format is not None and self.response_format.type != "text":
            raise unsupported("response_format", FORCED_FORM)
        if self.top_logprobs:
            raise unsupported("top_logprobs", "the engine returns the log-probability of the sampled token alone")
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise invalid("n", f"{self.n} is not between 1 and {MAX_CHOICES}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        limits = (("max_completion_tokens", self.max_completion_tokens), ("max_tokens", self.max_tokens))
        return Call(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())),
            tool_calls=self.tool_choice != "none",
            options=self.chat_template_kwargs,
            n=self.n or 1,
            max_tokens=min(
                (v for f, v in limits if check_max_tokens(f, v) is not None and v is not None), default=None
            ),
            stop=tuple(filter(None, stop)),
        )

    def response(self, answers: Answers, history: History) -> Any:
        choices = [
            {
                "index": index,
                "message": _said(choice),
                "finish_reason": _finish(choice),
                "logprobs": self._logprobs(choice, answers),
            }
            for index, choice in enumerate(answers.choices)
        ]
        return self._head("chat.completion", answers) | {"choices": choices, "usage": _usage(answers)}

    def events(self, answers: Answers, history: History) -> Iterator[Event]:
        head = self._head("chat.completion.chunk", answers)
        usage = self.stream_options is not None and self.stream_options.include_usage
        head |= {"usage": None} if usage else {}

        def chunk(index: int, delta: Any, finish: str | None = None, logprobs: Any = None) -> Event:
            choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return Event("", head | {"choices": [choice]})

        for index, choice in enumerate(answers.choices):
            reply = choice.reply
            yield chunk(index, {"role": "assistant", "content": ""})
            if reply.reasoning:
                yield chunk(index, {"reasoning_content": reply.reasoning})
            if reply.content:
                yield chunk(index, {"content": reply.content})
            for number, written in enumerate(_said(choice).get("tool_calls", ())):
                yield chunk(index, {"tool_calls": [{"index": number} | written]})
            yield chunk(index, {}, _finish(choice), self._logprobs(choice, answers))
        if usage:
            yield Event("", head | {"choices": [], "usage": _usage(answers)})
        yield Event("", "[DONE]")

    def _head(self, kind: str, answers: Answers) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answers.id}", "object": kind, "created": int(answers.created), "model": self.model}

    def _logprobs(self, choice: Answer, answers: Answers) -> Any:
        return {"content": token_logprobs(choice, answers.decode), "refusal": None} if self.logprobs else None


def _message(message: ChatMessage, field: str) -> Message:
    found: Message = {"role": message.role, "content": _text(message.content, field)}
    if message.role == "assistant":
        if reasoning := message.reasoning_content or message.reasoning:
            found["reasoning_content"] = reasoning
        if message.tool_calls:
            found["tool_calls"] = [msgspec.to_builtins(call) | {"type": "function"} for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def _text(content: str | list[Part] | None, field: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content or ()):
        if part.type not in ("text", "refusal"):
            raise unsupported(f"{field}.content[{i}].type", f"{part.type}: {TEXT_ALONE}")
    return "".join(part.text or part.refusal for part in content or ())


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type != "function" or tool.function is None:
        raise unsupported(f"{field}.type", f"{tool.type}: only functions are")
    return function_tool(tool.function.name, tool.function.description, tool.function.parameters)


def _said(choice: Answer) -> Message:
    message = choice.reply.message()
    return message | {"content": message["content"] or None} if "tool_calls" in message else message


def _finish(choice: Answer) -> str:
    return "tool_calls" if choice.reply.tool_calls and choice.finish == "stop" else choice.finish


def _usage(answers: Answers) -> dict[str, int]:
    sampled = answers.sampled_tokens
    return {
        "prompt_tokens": answers.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answers.prompt_tokens + sampled,
    }
