"""The record with the chat formats of real families."""

from pathlib import Path

import pytest

from asyncrl.chat import Message
from asyncrl.gateway.record import Answer, EpisodeRecord, SampledTokens
from asyncrl.types import Segment
from tests.support.chat_families import FAMILIES

TOOLS = (
    {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {"type": "object"}}},
)
CALLING = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "find", "arguments": {"key":  "a"}}\n</tool_call>'


class Played:
    def __init__(self, family: str, directory: Path, **options: object) -> None:
        self._tokenizer, self.chat = FAMILIES[family].load(directory)
        self._end = FAMILIES[family].ends[0]
        self._record = EpisodeRecord(self.chat, max_tokens=5000, **options)  # type: ignore[arg-type]

    def say(self, messages: list[Message], text: str) -> tuple[str, Answer]:
        """The prompt as text, and the answer."""
        [call] = self._record.begin(messages, TOOLS)
        ids = self._tokenizer.encode_rendered(text + self._end)
        sampled = SampledTokens((Segment.sampled(ids, [-1.0] * len(ids), 1),), "stop")
        return self.chat.decode(call.prompt.tolist()), self._record.end(call, sampled)

    @property
    def causes(self) -> list[str]:
        return [branch.cause for branch in self._record.trajectory()[1].branches]


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if not (family.changes or family.reasoning)]
)
def test_a_kept_history_reads_as_the_template_writes_it(family: str, tmp_path: Path) -> None:
    played = Played(family, tmp_path)
    messages: list[Message] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    for turn in range(3):
        prompt, answer = played.say(messages, f"Reply {turn}.")
        assert answer.reply.content == f"Reply {turn}."
        assert prompt == played.chat.decode(played.chat.encode(messages, TOOLS))
        messages += [answer.reply.message(), {"role": "user", "content": f"more {turn}"}]
    assert played.causes == []


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3-training"])
def test_tool_calls_and_reasoning_of_qwen(family: str, tmp_path: Path) -> None:
    played = Played(family, tmp_path)
    messages: list[Message] = [{"role": "user", "content": "go"}]
    first_prompt, first = played.say(messages, CALLING)
    [call] = first.reply.tool_calls
    assert (call.name, call.arguments) == ("find", '{"key":  "a"}')
    sent = {**first.reply.message(), "reasoning_content": None}
    messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "b"}]
    prompt, second = played.say(messages, "It is b.")
    messages += [second.reply.message(), {"role": "user", "content": "sure?"}]
    last_prompt, _ = played.say(messages, "Yes.")
    assert played.causes == []
    assert prompt.startswith(first_prompt + CALLING + "<|im_end|>" if family != "qwen2.5" else first_prompt)
    assert '{"key":  "a"}' in last_prompt, "as the model wrote it, with two spaces"


def test_a_template_that_strips_reasoning_makes_branches_if_it_is_asked_to_render(tmp_path: Path) -> None:
    played = Played("qwen3", tmp_path, history="template")
    messages: list[Message] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn}"})
        _, answer = played.say(messages, f"<think>\nhm {turn}\n</think>\n\nyes")
        messages.append(answer.reply.message())
    assert played.causes == ["reasoning_stripped"] * 2


def test_a_rendered_tool_call_has_other_blanks(tmp_path: Path) -> None:
    played = Played("qwen2.5", tmp_path, history="template")
    messages: list[Message] = [{"role": "user", "content": "go"}]
    _, first = played.say(messages, 'I look.\n<tool_call>\n{"name": "find", "arguments": {"key":  "a"}}\n</tool_call>')
    messages += [first.reply.message(), {"role": "tool", "tool_call_id": "x", "content": "b"}]
    played.say(messages, "It is b.")
    assert played.causes == ["tool_call_rerendered"]
