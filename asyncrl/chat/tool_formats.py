"""How models write tool calls, one format for each family. What cannot be read as a call stays text, without an error.

A new one is a function and a line in TOOL_FORMATS; its name is what `agent.tool_format` takes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from asyncrl.chat.messages import Tools


class Call(NamedTuple):
    name: str
    arguments: str
    id: str = ""
    """If the model wrote one."""


class Parsed(NamedTuple):
    content: str
    calls: Sequence[Call] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class ToolFormat:
    parse: Callable[[str, Tools], Parsed]
    """A reply without its end token and, unless `channels`, without its reasoning."""
    ends: tuple[str, ...] = ()
    """What closes a turn in the history, beside the tokens that end a completion."""
    channels: bool = False
    """Reasoning and content are told apart by the format itself."""
    id_length: int = 0
    """Of the ids of calls, where templates insist on one."""


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    id: Any = ""


def _call(written: str | bytes | msgspec.Raw) -> Call | None:
    """A call from a JSON object, its arguments exactly as they stand there; None: it is no call."""
    try:
        found = msgspec.json.decode(written, type=_WrittenCall)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    text = bytes(found.arguments)
    arguments = _arguments((text if text != b"null" else bytes(found.parameters)).decode())
    if arguments is None or not found.name:
        return None
    return Call(found.name, arguments, found.id if isinstance(found.id, str) else "")


def _arguments(text: str) -> str | None:
    """A JSON object as it is written; none at all is an empty one, and some models write it as a JSON string."""
    text = text.strip()
    try:
        value = msgspec.json.decode(text or "null")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if value is None:
        return "{}"
    if isinstance(value, str):
        return _arguments(value) if value[:1] in "{" else None
    return text if isinstance(value, dict) else None


def _plain(text: str, tools: Tools) -> Parsed:
    return Parsed(text)


class Found(NamedTuple):
    call: Call
    stop: int
    """Where the text goes on."""


def _tagged(text: str, read: Callable[[str, int], Found | None], gap: str) -> Parsed:
    """Calls between <tool_call> and </tool_call>; the last one may lack its end. `gap` stands before the first one."""
    content, calls = "", list[Call]()
    position = search = 0
    while (tag := text.find("<tool_call>", search)) >= 0:
        search = tag + len("<tool_call>")
        if (found := read(text, search)) is None or (end := _TOOL_CALL_END.match(text, found.stop)) is None:
            continue
        between = text[position:tag]
        content += between.removesuffix(gap) if not calls else between if between.strip() else ""
        calls.append(found.call)
        position = search = end.end()
    rest = text[position:]
    return Parsed(content + (rest if not calls or rest.strip() else ""), calls)


_TOOL_CALL_END = re.compile(r"\s*(</tool_call>|\Z)")


def _hermes(text: str, tools: Tools) -> Parsed:
    return _tagged(text, _json_call, "\n")


def _json_call(text: str, start: int) -> Found | None:
    """JSON first, then the closing tag, which may stand in an argument too."""
    start = _BLANKS.match(text, start).end()  # pyright: ignore[reportOptionalMemberAccess]
    try:
        _, stop = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    call = _call(text[start:stop])
    return call and Found(call, stop)


_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _qwen3_coder(text: str, tools: Tools) -> Parsed:
    return _tagged(text, lambda text, start: _xml_call(text, start, tools), "\n\n")


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(text: str, start: int, tools: Tools) -> Found | None:
    head, stop = _FUNCTION.match(text, start), text.find("</function>", start)
    if head is None or stop < 0:
        return None
    name = head[1].strip()
    types = _parameter_types(name, tools)
    arguments, position = dict[str, Any](), head.end()
    while found := _PARAMETER.match(text, position, stop):
        key = found[1].strip()
        arguments[key] = _value(found[2], types.get(key))
        position = found.end()
    if text[position:stop].strip():
        return None
    return Found(Call(name, json.dumps(arguments, ensure_ascii=False)), stop + len("</function>"))


def _parameter_types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        match tool:
            case {"function": {"name": str(known), "parameters": {"properties": Mapping() as properties}}} if (
                known == name
            ):
                return {key: each.get("type") for key, each in properties.items() if isinstance(each, Mapping)}
            case _:
                pass
    return {}


def _value(text: str, kind: Any) -> Any:
    """Texts are written as they are, all else as JSON; only the tool's schema tells "5" from 5. What Python's own
    reader takes beyond that (1e999, half a surrogate pair) could not be written as JSON again."""
    if kind == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def _llama3_json(text: str, tools: Tools) -> Parsed:
    """The whole reply is calls, after `<|python_tag|>` or alone; several stand behind `;`."""
    content, tag, written = text.partition("<|python_tag|>")
    if not tag:
        content, written = "", text
    calls = _json_sequence(written)
    return Parsed(content, calls) if calls else Parsed(text)


def _json_sequence(text: str) -> list[Call]:
    """Calls behind one another; none if anything else is among them."""
    calls, position = list[Call](), 0
    while piece := _PIECE.match(text, position):
        if (found := _json_call(text, piece.end())) is None:
            return []
        calls.append(found.call)
        position = found.stop
    return [] if text[position:].strip(" \t\r\n;") else calls


_PIECE = re.compile(r"[\s;,]*(?=\{)")


def _mistral(text: str, tools: Tools) -> Parsed:
    """`[TOOL_CALLS] [{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    content, tag, written = text.partition("[TOOL_CALLS]")
    calls = _listed(written) if written.lstrip().startswith(("[", "{")) else _named(written)
    return Parsed(content, calls) if tag and calls else Parsed(text)


def _listed(written: str) -> list[Call]:
    try:
        found = msgspec.json.decode(written, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    calls = [_call(each) for each in found] if isinstance(found, list) else [_call(written)]
    return [call for call in calls if call] if all(calls) else []


def _named(written: str) -> list[Call]:
    calls = list[Call]()
    for each in written.split("[TOOL_CALLS]"):
        found = _NAMED.fullmatch(each)
        if found is None or (arguments := _arguments(found[3])) is None:
            return []
        calls.append(Call(found[1], arguments, found[2] or ""))
    return calls


_NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\]|(?=\{))(.*)", re.DOTALL)
"""Some versions write no [ARGS]."""


def _harmony(text: str, tools: Tools) -> Parsed:
    """Messages on channels: `analysis` is reasoning, what is sent to a function a call, the rest content."""
    content, reasoning, calls, position = list[str](), list[str](), list[Call](), 0
    while found := _CHANNEL_MESSAGE.match(text, position):
        position = found.end()
        header, body = found[1], found[2]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if channel is None:
            content.append(found[0])
        elif recipient is not None:
            name, arguments = recipient[1].removeprefix("functions."), _arguments(body)
            if name and arguments is not None:
                calls.append(Call(name, arguments))
            else:
                content.append(found[0])
        else:
            (reasoning if channel[1] == "analysis" else content).append(body)
    content.append(text[position:])
    return Parsed("\n".join(filter(None, content)), calls, "\n".join(filter(None, reasoning)))


_CHANNEL_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?((?:[^<]|<\|channel\|>|<\|constrain\|>)*)<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(_hermes),
    "qwen3_coder": ToolFormat(_qwen3_coder),
    "llama3_json": ToolFormat(_llama3_json),
    "mistral": ToolFormat(_mistral, id_length=9),
    "harmony": ToolFormat(_harmony, ends=("<|end|>", "<|call|>", "<|return|>"), channels=True),
    "plain": ToolFormat(_plain),
}
