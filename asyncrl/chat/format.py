"""The chat format of one model: messages to token ids, and sampled ids to messages.

encode         the prompt of a call, as transformers would make it
parse          a reply: content, reasoning and tool calls
said_turns     prompt and reply of each turn in a conversation that somebody else wrote
continuation   what follows a reply whose sampled tokens are kept, so that nothing sampled is tokenized again
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from asyncrl.chat.append_only import changes_of_history
from asyncrl.chat.messages import Message, Reply, SaidTurn, ToolCall, Tools, for_template, short_id
from asyncrl.chat.tool_formats import TOOL_FORMATS, Call, Parsed
from asyncrl.data.tokenizer import ChatTemplate, Tokenizer
from asyncrl.errors import ChatError, CheckpointError, ConfigError

Options = Mapping[str, Any]
"""Variables of the chat template, such as `enable_thinking`."""
NO_OPTIONS: Options = MappingProxyType({})
ID = re.compile("[A-Za-z0-9]{9}")
"""Of a call that the model gave an id itself, as Mistral's do."""
RESERVED = ("messages", "tools", "add_generation_prompt")

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
LONGEST_OPENING = 16
"""Tokens at the end of a prompt among which its opening of the reasoning is."""

QUESTION: Message = {"role": "user", "content": "question"}
PROBE_CALL = ToolCall("probe0000", "look_up", '{"key": "value"}')
PROBE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": PROBE_CALL.name,
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class _Shown(NamedTuple):
    """A turn of the model's as the template writes it."""

    prompt: str
    reply: str
    """Up to its end."""
    ends: bool
    """Whether the template writes one."""

    @property
    def text(self) -> str:
        return self.prompt + self.reply


class ChatFormat:
    """Encodes and parses for one model. It never changes: any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "") -> None:
        if tool_format and tool_format not in TOOL_FORMATS:
            raise ConfigError(
                f"agent.tool_format={tool_format} is not known; choose one of {', '.join(TOOL_FORMATS)}, "
                "or leave it empty: then it is found from the chat template"
            )
        self._tokenizer = tokenizer
        self._template = template = tokenizer.chat_template
        try:
            opened = _render(template, [QUESTION])
        except ChatError as error:
            raise CheckpointError(f"{error}; repair the template of the model") from None
        ends = _ends(tokenizer)
        self.tool_format = tool_format or _find_tool_format(template, ends)
        """Its name in TOOL_FORMATS."""
        self._shows_tools = bool(tool_format) or self.tool_format != "plain"
        self._shows_parallel_calls = _shows_parallel_calls(template)
        self._format = TOOL_FORMATS[self.tool_format]
        self._end = re.compile("|".join(map(re.escape, sorted({*ends, *self._format.ends}))))
        self._end_ids = {id for end in {*ends, *self._format.ends} if len(ids := self._ids(end)) == 1 for id in ids}
        self._reasoning_tags = next((tags for tags in REASONING_TAGS if template.mentions(tags[1])), None)
        self._opens_reasoning = self._is_opening(opened)

    def encode(self, messages: Sequence[Message], tools: Tools = (), *, options: Options = NO_OPTIONS) -> list[int]:
        """Ids up to where the model's next turn begins."""
        return self._ids(self._shown(messages, tools, options))

    def said_turns(
        self, messages: Sequence[Message], tools: Tools = (), *, of: Collection[int], options: Options = NO_OPTIONS
    ) -> Iterator[SaidTurn]:
        """The assistant's messages of these numbers as turns: each in the tokens that a call would have had before it,
        and in those of the template's text when it is the last message."""
        line = list[_Shown]()
        for shown in self._replies(messages, tools, of, options):
            if line and not shown.prompt.startswith(line[-1].text):
                yield from self._tokenized(line)
                line.clear()
            line.append(shown)
        yield from self._tokenized(line)

    def _replies(
        self, messages: Sequence[Message], tools: Tools, of: Collection[int], options: Options
    ) -> Iterator[_Shown]:
        before = list[Message]()
        for number, message in enumerate(messages):
            for part in [message] if self._shows_parallel_calls else _with_one_call(message):
                if number in of:
                    prompt = self._shown(before, tools, options)
                    reply = self._reply(prompt, before, part, tools, options)
                    end = max((found.end() for found in self._end.finditer(reply)), default=0)
                    ends = bool(end) and not reply[end:].strip()
                    yield _Shown(prompt, reply[:end] if ends else reply.rstrip(), ends)
                before.append(part)

    def _reply(self, prompt: str, before: Sequence[Message], message: Message, tools: Tools, options: Options) -> str:
        """What the template writes behind the prompt for a message of the model's."""
        shown = self._shown([*before, message], tools, options, open_turn=False)
        if shown.startswith(prompt):
            return shown[len(prompt) :]
        for landmark in self._landmarks(prompt, before, tools, options):
            _, found, reply = shown.rpartition(landmark)
            if found:
                return reply
        raise ChatError(
            "the chat template does not begin a turn of the history as it begins one that is sampled, so what the "
            "model should say cannot be told from what it is given"
        )

    def _landmarks(self, prompt: str, before: Sequence[Message], tools: Tools, options: Options) -> Iterator[str]:
        """Ends of a prompt behind which the reply begins, where the template writes what is before it in another way
        once there is a reply: the last message and the opening of the turn, or the opening alone."""
        content = before[-1].get("content") if before else None
        if isinstance(content, str) and content and (start := prompt.rfind(content)) >= 0:
            yield prompt[start:]
        history = self._shown(before, tools, options, open_turn=False)
        if prompt.startswith(history) and (opening := prompt[len(history) :]):
            yield opening

    def _tokenized(self, line: Sequence[_Shown]) -> Iterator[SaidTurn]:
        """Turns of which each goes on from the text of the one before it. Their texts are tokenized one by one: that
        is as all of it together, unless the tokenizer makes one token of where two meet. Then each turn is tokenized
        as a call's prompt is, and what follows it."""
        texts, seen = list[str](), ""
        for shown in line:
            texts += shown.prompt[len(seen) :], shown.reply
            seen = shown.text
        pieces = [self._ids(text) for text in texts]
        apart = [token for piece in pieces for token in piece] != self._ids(seen)
        prompt = list[int]()
        for shown, given, said in zip(line, pieces[::2], pieces[1::2], strict=True):
            prompt = self._ids(shown.prompt) if apart else [*prompt, *given]
            whole = self._ids(shown.text) if apart else []
            reply = whole[len(prompt) :] if whole and whole[: len(prompt)] == prompt else said
            yield SaidTurn(prompt, reply if shown.ends else [*reply, self._tokenizer.eos_ids[0]])
            prompt = [*prompt, *reply]

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Tools,
        kept: int,
        after: int,
        *,
        options: Options = NO_OPTIONS,
    ) -> list[int] | None:
        """Ids that follow the sampled tokens of the reply `messages[kept - 1]`, up to where the next turn begins.

        They are the reply's closing, unless its last token `after` is an end already, and messages[kept:]. What came
        before stays as it was sampled, whatever the template would make of it now; that the messages up to the reply
        and the tools are those of its call is for the caller to know. None: the template cannot be continued.
        """
        reply, rest = messages[kept - 1], messages[kept:]
        mark = short_id(json.dumps(rest), 32)  # which no text among the rest can hold
        try:
            shown = self._shown([*messages[: kept - 1], _stand_in(reply, mark), *rest], tools, options)
        except ChatError:
            return None  # of the stand-in; for messages that cannot be shown, `encode` says why
        _, found, following = shown.rpartition(mark)
        end = self._end.search(following)
        if reply.get("tool_calls"):
            if not end:
                return None
            closing = end.start()  # between the mark and the end is what the model itself writes around its arguments
        else:
            closing = 0
            if end and following[: end.start()].strip():
                end = None  # of a later message
        if end and after in self._end_ids:
            closing = end.end()
        return self._ids(following[closing:]) if found else None

    def parse(
        self, ids: Sequence[int], tools: Tools | None = None, *, prompt: Sequence[int] | None = None, call: int = 0
    ) -> Reply:
        """What the sampled ids say. Whatever cannot be read stays in the content.

        `tools` are those of the call: if there are none, the reply is all content; None is not to know them. `prompt`,
        the ids before the reply, tells whether the reasoning begins in it; without it, it is taken to be the
        template's default. `call` is the number of the call in its episode: ids of tool calls are made of it and of
        the tool call, so that they differ between calls and are the same each time the reply is parsed.
        """
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, special_tokens=True)
        if self._format.channels:
            content, calls, reasoning = self._format.parse(text, tools or ())
        else:
            reasoning, text = self._split_reasoning(text, prompt)
            content, calls, _ = self._format.parse(text, tools or ()) if tools is None or tools else Parsed(text)
        return Reply(content, reasoning, tuple(_tool_calls(calls, call)))

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return self._tokenizer.decode(ids, special_tokens=True)

    def not_append_only(self, *, options: Options = NO_OPTIONS) -> str:
        """What the template changes in the history of a conversation, and what that costs; empty: it only appends."""
        tools = (PROBE_TOOL,) if self._shows_tools else ()
        reasoning = self._reasoning_tags is not None or self._format.channels
        return changes_of_history(partial(self._shown, options=options), tools, reasoning=reasoning)

    def _shown(self, messages: Sequence[Message], tools: Tools, options: Options, *, open_turn: bool = True) -> str:
        if tools and not self._shows_tools:
            raise ChatError(
                "the call has tools, and the model's chat template writes no tool calls in a form that is known; "
                f"leave the tools out, or set agent.tool_format to one of {', '.join(TOOL_FORMATS)}"
            )
        if not self._shows_parallel_calls:
            messages = [each for message in messages for each in _with_one_call(message)]
        return _render(self._template, messages, tools, options, open_turn=open_turn, id_length=self._format.id_length)

    def _ids(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_rendered(text)
        except Exception as error:  # `tokenizers` raises nothing narrower for text that the model has no token for
            raise ChatError(f"the messages cannot be written in the model's tokens: {error}") from None

    def _split_reasoning(self, text: str, prompt: Sequence[int] | None) -> tuple[str, str]:
        if self._reasoning_tags is None:
            return "", text
        opening, closing = self._reasoning_tags
        thought, closed, content = text.partition(closing)
        if thought.lstrip().startswith(opening):
            thought = thought.lstrip().removeprefix(opening)
        elif opening in thought or not (closed or self._opened(prompt)):
            return "", text
        return thought.strip("\n"), content.lstrip("\n")

    def _opened(self, prompt: Sequence[int] | None) -> bool:
        if prompt is None:
            return self._opens_reasoning
        return self._is_opening(self._tokenizer.decode(prompt[-LONGEST_OPENING:], special_tokens=True))

    def _is_opening(self, prompt: str) -> bool:
        return self._reasoning_tags is not None and prompt.rstrip().endswith(self._reasoning_tags[0])


def _render(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools = (),
    options: Options = NO_OPTIONS,
    *,
    open_turn: bool = True,
    id_length: int = 0,
) -> str:
    if taken := [name for name in RESERVED if name in options]:
        raise ChatError(f"{', '.join(taken)} cannot be set as a variable of the chat template")
    try:
        shown = [for_template(message, id_length) for message in messages]
        if not template.mentions("developer"):  # OpenAI's newer name
            shown = [each | {"role": "system"} if each.get("role") == "developer" else each for each in shown]
        return template.render_messages(shown, tools, options, open_turn=open_turn)
    except ChatError:
        raise
    except Exception as error:  # a template does anything with messages that it was not written for
        reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        raise ChatError(f"the messages cannot be shown with the model's chat template: {reason}") from None


def _ends(tokenizer: Tokenizer) -> set[str]:
    """What the model ends a completion with, and what its template closes a turn with; for base models these differ."""
    ends = {tokenizer.decode([end], special_tokens=True) for end in tokenizer.eos_ids}
    try:
        shown = _render(tokenizer.chat_template, [QUESTION, {"role": "assistant", "content": "reply"}, QUESTION])
        closing = tokenizer.encode_rendered(shown.partition("reply")[2].lstrip())[:1]
    except ChatError:
        closing = []
    if closing and not tokenizer.decode(closing):
        ends.add(tokenizer.decode(closing, special_tokens=True))
    return {end for end in ends if end}


def _find_tool_format(template: ChatTemplate, ends: Iterable[str]) -> str:
    """The format that reads back the call that the template was given to show."""
    reply = Reply("", "", (PROBE_CALL,)).message()
    try:
        prompt = _render(template, [QUESTION], [PROBE_TOOL])
        shown = _render(template, [QUESTION, reply], [PROBE_TOOL], open_turn=False)
    except ChatError:
        return "plain"
    # A prompt may begin the turn in another way than the history does; what both begin with may reach into the call.
    begun = next((i for i, (one, other) in enumerate(zip(prompt, shown, strict=False)) if one != other), len(prompt))
    written = shown[len(shown[:begun].rstrip('<[{" ')) :].rstrip()
    for end in ends:
        written = written.removesuffix(end)
    for name, each in TOOL_FORMATS.items():
        calls = each.parse(written, [PROBE_TOOL]).calls
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(PROBE_CALL.name, {"key": "value"})]:
            return name
    return "plain"


def _shows_parallel_calls(template: ChatTemplate) -> bool:
    """Whether several calls in one message are shown. Llama's template refuses them, gpt-oss's shows the first."""
    other = ToolCall("probe0001", PROBE_CALL.name, '{"key": "other"}')
    try:
        return "other" in _render(template, [QUESTION, Reply("", "", (PROBE_CALL, other)).message()], [PROBE_TOOL])
    except ChatError:
        return False


def _with_one_call(message: Message) -> Iterator[Message]:
    """A message for each call: a model may write more calls than its template shows in one."""
    first, *others = message.get("tool_calls") or (None,)
    yield message if not others else {**message, "tool_calls": [first]}
    yield from ({"role": "assistant", "content": "", "tool_calls": [call]} for call in others)


def _stand_in(reply: Message, mark: str) -> Message:
    """A message of the same kind, with the mark where its last text is."""
    calls = reply.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": mark}
    *others, last = calls
    marked = {**last, "function": {**last["function"], "arguments": {"mark": mark}}}
    return {"role": "assistant", "content": "", "tool_calls": [*others, marked]}


def _tool_calls(calls: Sequence[Call], number: int) -> Iterator[ToolCall]:
    seen = set[str]()
    for i, call in enumerate(calls):
        written = call.id if ID.fullmatch(call.id) and call.id not in seen else ""
        found = written or short_id(f"{number}/{i}/{call.name}/{call.arguments}")
        seen.add(found)
        yield ToolCall(found, call.name, call.arguments)
