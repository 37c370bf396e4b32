"""A chat format whose every rule can be seen: a token per character, ChatML around messages, and more than one
tokenization: "ab" is one token where text is encoded, and two where a model samples it so."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.chat import Message, Reply, ToolCall

START, END, AB = 1, 2, 3
PIECES = {START: "<|im_start|>", END: "<|im_end|>", AB: "ab"}
_TOKENS = re.compile(r"<\|im_start\|>|<\|im_end\|>|ab|.", re.DOTALL)
_CALL = re.compile(r"<call>(\w+) (.*?)</call>", re.DOTALL)
IDS = {piece: token for token, piece in PIECES.items()}


def encode(text: str) -> list[int]:
    return [IDS.get(piece) or ord(piece) for piece in _TOKENS.findall(text)]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES.get(token) or chr(token) for token in ids)


class CharacterChat:
    """`strips`: as Qwen3's, it leaves out the reasoning of replies before the last message of the user."""

    def __init__(self, *, strips: bool = False, continues: bool = True) -> None:
        self._strips = strips
        self._continues = continues

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, options: Mapping[str, Any] = {}
    ) -> list[int]:
        return encode(self.show(messages, tools))

    def show(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        head = f"<tools>{json.dumps(tools)}</tools>" if tools else ""
        shown = [self._message(each, self._strips and i < last) for i, each in enumerate(messages)]
        return head + "".join(shown) + "<|im_start|>assistant\n"

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        kept: int,
        after: int,
        *,
        options: Mapping[str, Any] = {},
    ) -> list[int] | None:
        if not self._continues:
            return None
        closing = "\n" if after == END else "<|im_end|>\n"
        return encode(closing + "".join(map(self._message, messages[kept:])) + "<|im_start|>assistant\n")

    def _message(self, message: Message, stripped: bool = False) -> str:
        reasoning = "" if stripped else message.get("reasoning_content") or ""
        content = message.get("content") or ""
        content = content if isinstance(content, str) else "".join(part["text"] for part in content)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = (f"<think>{reasoning}</think>" if reasoning else "") + content
        said += "".join(f"<call>{call['name']} {call['arguments']}</call>" for call in calls)
        return f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: Sequence[int] | None = None,
        call: int = 0,
    ) -> Reply:
        text = decode(ids).removesuffix(PIECES[END])
        reasoning = ""
        if text.startswith("<think>"):
            reasoning, _, text = text.removeprefix("<think>").partition("</think>")
        if tools == ():
            return Reply(text, reasoning)
        calls = [ToolCall(f"call_{call}_{i}", *found) for i, found in enumerate(_CALL.findall(text))]
        return Reply(_CALL.sub("", text), reasoning, tuple(calls))

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)
