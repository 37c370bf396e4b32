"""Prompts are those of transformers, replies are read back, what follows a kept reply is what the template writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncrl.chat import ChatFormat, Message, Reply, ToolCall
from asyncrl.chat.messages import short_id
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.errors import ChatError, CheckpointError, ConfigError
from tests.support.chat_families import FAMILIES, Family
from tests.support.tiny_chat import CHATML, save_chat_tokenizer

PROPERTIES = {key: {"type": "string"} for key in ("city", "day", "note")} | {"days": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call {name}.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("get_weather", "search")
]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is the weather in Graz?"}
WEATHER = ToolCall("call00001", "get_weather", '{"city": "Graz", "days": 2}')
SEARCH = ToolCall("call00002", "search", '{"city": "Graz & <Linz>", "note": "ünïcödé \\"quoted\\""}')


@dataclass(frozen=True)
class Model:
    family: Family
    directory: Path
    tokenizer: Tokenizer
    format: ChatFormat
    theirs: Any

    def rendered(
        self, messages: list[Message], *, tools: object = TOOLS, add_generation_prompt: bool = False
    ) -> list[int]:
        """By transformers, which wants arguments as objects."""
        return self.theirs.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )

    def sampled(self, history: list[Message], reply: Reply) -> list[int]:
        """A reply as the template writes it when it is the last message, up to its end token."""
        prompt = self.format.encode(history, TOOLS)
        whole = self.rendered([*history, reply.message()])
        assert whole[: len(prompt)] == prompt
        ids = whole[len(prompt) :]
        last = max(i for i, token in enumerate(ids) if token in self.tokenizer.eos_ids)
        return ids[: last + 1]


def _with_objects(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made = dict[str, Model]()

    def get(name: str) -> Model:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            tokenizer, chat = FAMILIES[name].load(directory)
            made[name] = Model(FAMILIES[name], directory, tokenizer, chat, AutoTokenizer.from_pretrained(directory))
        return made[name]

    return get


each_family = pytest.mark.parametrize("name", FAMILIES)


def result(call: ToolCall, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def conversation(family: Family) -> list[Message]:
    """System, question, a call (or two), results, an answer, another question, another call and its result."""
    calls = (WEATHER, SEARCH)[: family.calls]
    thought = "I should ask.\n\nTwice." if family.reasoning else ""
    return [
        SYSTEM,
        USER,
        Reply("Let me see." if family.content_with_calls else "", thought, calls).message(),
        *(result(call, "a blue sky") for call in calls),
        Reply("It is blue.", thought).message(),
        {"role": "user", "content": "And tomorrow?"},
        Reply("", "", (WEATHER,)).message(),
        result(WEATHER, "grey"),
    ]


@each_family
def test_the_format_is_found_from_the_template(name: str, model: Callable[[str], Model]) -> None:
    assert model(name).format.tool_format == FAMILIES[name].tool_format


@each_family
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
def test_prompts_are_those_of_transformers(name: str, model: Callable[[str], Model], tools: list[Message]) -> None:
    whole, checked = conversation(FAMILIES[name])[1:], 0
    for stop in range(1, len(whole) + 1):
        if whole[stop - 1]["role"] == "assistant":
            continue
        if not tools and any("tool_calls" in message for message in whole[:stop]):
            break
        for system in ([], [SYSTEM]):
            expected = model(name).rendered([*system, *whole[:stop]], tools=tools or None, add_generation_prompt=True)
            assert model(name).format.encode([*system, *whole[:stop]], tools) == expected
            checked += 1
    assert checked >= (8 if tools else 2)


@pytest.mark.parametrize(
    "options", [{"enable_thinking": False}, {"enable_thinking": True}, {"bos_token": "<|im_end|>"}]
)
def test_options_are_variables_of_the_template(model: Callable[[str], Model], options: dict[str, Any]) -> None:
    ours = model("qwen3").format.encode([USER], TOOLS, options=options)
    theirs = model("qwen3").theirs
    assert ours == theirs.apply_chat_template(
        [USER], tools=TOOLS, add_generation_prompt=True, return_dict=False, **options
    )
    with pytest.raises(ChatError, match="tools cannot be set as a variable"):
        model("qwen3").format.encode([USER], options={"tools": []})


def test_messages_may_come_in_other_ways(model: Callable[[str], Model]) -> None:
    encode = model("qwen3").format.encode
    answered: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": Reply("", "", (WEATHER,)).message()["tool_calls"],
    }
    plain = [SYSTEM, USER, Reply("", "why", (WEATHER,)).message()]
    assert encode([SYSTEM | {"role": "developer"}, *plain[1:]]) == encode(plain)
    assert encode([SYSTEM, USER, answered | {"reasoning": "why", "refusal": None}]) == encode(plain)
    assert encode([SYSTEM, USER | {"content": [{"type": "text", "text": USER["content"]}]}, plain[2]]) == encode(plain)
    with pytest.raises(ChatError, match="content of the type 'image_url'; the policy reads text only"):
        encode([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ChatError, match="cannot be shown with the model's chat template: KeyError: 'function'"):
        encode([USER, {"role": "assistant", "tool_calls": [{}]}])


def test_a_template_for_tools_alone_is_taken_when_there_are_tools(tmp_path: Path) -> None:
    FAMILIES["hermes"].save(tmp_path)
    source = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": source}]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ChatFormat(load_tokenizer(tmp_path))
    assert ours.tool_format == "hermes"
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template([USER], tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.encode([USER], tools or ()) == expected


# What the model said.

WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]|{}", exclude_categories=["Cs", "Cc"]), max_size=30
)
TEXTS = (
    st.lists(WORDS.map(str.strip).filter(bool), max_size=3).map("\n\n".join).filter(lambda text: text == text.strip())
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "day", "note"]), st.one_of(TEXTS, st.just('{"a": "<b> \\n"}')), max_size=3
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments, days: ToolCall(
            "", name, json.dumps(arguments | ({"days": days} if days else {}), ensure_ascii=False)
        ),
        st.sampled_from(["get_weather", "search"]),
        ARGUMENTS,
        st.integers(0, 9),
    ),
    max_size=3,
)


@st.composite
def replies(draw: st.DrawFn, family: Family) -> Reply:
    calls = draw(CALLS)[: family.calls]
    content = draw(TEXTS) if family.content_with_calls or not calls else ""
    named = tuple(ToolCall(f"call{i:05}", call.name, call.arguments) for i, call in enumerate(calls))
    return Reply(content, draw(TEXTS) if family.reasoning else "", named)


def as_said(reply: Reply) -> tuple[object, ...]:
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls]


@each_family
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_reply_is_read_back(name: str, model: Callable[[str], Model], data: st.DataObject) -> None:
    reply = data.draw(replies(FAMILIES[name]))
    ids = model(name).sampled([USER], reply)
    prompt = model(name).format.encode([USER], TOOLS)
    parse = model(name).format.parse
    for given_tools in (TOOLS, None) if FAMILIES[name].tool_format != "qwen3_coder" else (TOOLS,):
        for end in (len(ids), len(ids) - 1):  # with its end token, and cut off just before
            assert as_said(parse(ids[:end], given_tools, prompt=prompt)) == as_said(reply)
    assert parse(ids, TOOLS, call=3) == parse(ids, TOOLS, call=3)
    made = [call.id for number in range(3) for call in parse(ids, TOOLS, call=number).tool_calls]
    assert all(len(each) == 9 and each.isalnum() for each in made)
    if name != "mistral":  # which writes the ids itself
        assert len(set(made)) == len(made)


@each_family
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_reply_that_was_cut_off_has_the_first_of_its_calls(
    name: str, model: Callable[[str], Model], data: st.DataObject
) -> None:
    reply = data.draw(replies(FAMILIES[name]))
    ids = model(name).sampled([USER], reply)
    found = model(name).format.parse(ids[: data.draw(st.integers(0, len(ids)))], TOOLS)
    calls = as_said(reply)[2]
    assert isinstance(calls, list)
    assert calls[: len(found.tool_calls)] == as_said(found)[2]
    assert reply.reasoning.startswith(found.reasoning.rstrip("\ufffd\n")) or not FAMILIES[name].reasoning


def test_reasoning_that_the_prompt_opened_or_closed(model: Callable[[str], Model]) -> None:
    chat, tokenizer = model("qwen3.6").format, model("qwen3.6").tokenizer
    ids = tokenizer.encode_rendered("still thinking")
    assert chat.parse(ids) == chat.parse(ids, prompt=chat.encode([USER])) == Reply("", "still thinking")
    closed = chat.encode([USER], options={"enable_thinking": False})
    assert chat.parse(ids, prompt=closed) == Reply("still thinking")
    both = tokenizer.encode_rendered("so\n</think>\n\nYes.<|im_end|>")
    assert chat.parse(both) == Reply("Yes.", "so")
    # Without a template that knows of reasoning the tags are text like any other.
    tagged = model("qwen2.5").tokenizer.encode_rendered("<think>so</think>Yes.")
    assert model("qwen2.5").format.parse(tagged) == Reply("<think>so</think>Yes.")


def test_without_tools_nothing_is_a_call(model: Callable[[str], Model]) -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    ids = model("qwen3").tokenizer.encode_rendered(text)
    assert [call.name for call in model("qwen3").format.parse(ids).tool_calls] == ["search"]
    assert model("qwen3").format.parse(ids, []) == Reply(text)


# What follows a reply whose tokens are kept.


@each_family
@pytest.mark.parametrize("kept", [3, -3, -1])
def test_a_conversation_goes_on_as_the_template_writes_it(name: str, model: Callable[[str], Model], kept: int) -> None:
    """What follows a reply is the same text that the whole conversation ends with, whatever comes before."""
    family, (tokenizer, chat) = FAMILIES[name], (model(name).tokenizer, model(name).format)
    whole = [*conversation(family), Reply("Grey.").message(), {"role": "user", "content": "Thanks!"}]
    kept = kept % len(whole)
    assert whole[kept - 1]["role"] == "assistant"
    expected = tokenizer.decode(chat.encode(whole, TOOLS), special_tokens=True)
    for after in (*tokenizer.eos_ids, 0):
        ids = chat.continuation(whole, TOOLS, kept, after)
        assert ids is not None
        text = tokenizer.decode(ids, special_tokens=True)
        assert expected.endswith(text)
        closed = [end for end in (*family.ends, "<|end|>") if text.startswith(end)]
        assert bool(closed) == (after == 0)  # an end is never written twice, and never left out
        assert whole[kept]["content"] in text
        assert whole[kept - 1]["content"] not in text or not whole[kept - 1]["content"]


APPEND_ONLY = [name for name, family in FAMILIES.items() if not family.changes]


@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prompt_reply_and_continuation_are_the_prompt_of_the_next_call(
    name: str, model: Callable[[str], Model], data: st.DataObject
) -> None:
    """Over several turns, with whatever messages between them, where the reply is tokenized as it was sampled."""
    chat, tokenizer = model(name).format, model(name).tokenizer
    messages: list[Message] = [SYSTEM, USER][data.draw(st.integers(0, 1)) :]
    tokens = chat.encode(messages, TOOLS)
    for _ in range(data.draw(st.integers(1, 4))):
        reply = data.draw(replies(FAMILIES[name]))
        sampled = model(name).sampled(messages, reply)
        sampled = sampled[: len(sampled) - data.draw(st.integers(0, 1))]  # the end is missing after a cut
        text = tokenizer.decode([*tokens, *sampled], special_tokens=True)
        assume(tokenizer.encode_rendered(text) == [*tokens, *sampled])
        messages.append(reply.message())
        kept = len(messages)
        messages += [result(call, data.draw(TEXTS)) for call in reply.tool_calls]
        if not reply.tool_calls or data.draw(st.booleans()):
            messages.append({"role": "user", "content": data.draw(TEXTS)})
        following = chat.continuation(messages, TOOLS, kept, sampled[-1] if sampled else -1)
        assert following is not None
        tokens = [*tokens, *sampled, *following]
        assert tokens == chat.encode(messages, TOOLS)


def test_the_end_that_was_sampled_stands_for_the_templates(model: Callable[[str], Model]) -> None:
    """<|return|> ends a reply of gpt-oss, and its history has <|end|> in that place."""
    chat, tokenizer = model("gpt-oss").format, model("gpt-oss").tokenizer
    messages = [USER, Reply("Blue.").message(), USER]
    (returned,) = tokenizer.encode_rendered("<|return|>")
    ids = chat.continuation(messages, TOOLS, 2, returned)
    assert ids is not None
    assert (
        tokenizer.decode(ids, special_tokens=True)
        == f"<|start|>user<|message|>{USER['content']}<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls == 1])
def test_more_calls_than_a_template_shows_in_one_message(name: str, model: Callable[[str], Model]) -> None:
    """A model of Llama's may write several calls; the conversation goes on as if it had made them in turn."""
    chat = model(name).format
    results = [result(WEATHER, "a blue sky"), result(SEARCH, "found")]
    together = [USER, Reply("", "", (WEATHER, SEARCH)).message(), *results]
    in_turn = [USER, Reply("", "", (WEATHER,)).message(), Reply("", "", (SEARCH,)).message(), *results]
    assert (
        chat.encode(together, TOOLS)
        == chat.encode(in_turn, TOOLS)
        == model(name).rendered(in_turn, add_generation_prompt=True)
    )
    following = chat.continuation(together, TOOLS, 2, model(name).tokenizer.eos_ids[0])
    assert following is not None
    assert following == chat.encode(together, TOOLS)[-len(following) :]
    text = model(name).tokenizer.decode(following, special_tokens=True)
    assert "a blue sky" in text
    assert "Linz" not in text


def test_text_that_looks_like_a_stand_in_is_text(model: Callable[[str], Model]) -> None:
    """Hypothesis once drew the very text that stood for a reply."""
    chat, tokenizer = model("ministral").format, model("ministral").tokenizer
    rest: Message = {"role": "user", "content": short_id(json.dumps([]), 32)}
    for _ in range(3):
        ids = chat.continuation([USER, Reply("Blue.").message(), rest], TOOLS, 2, tokenizer.eos_ids[0])
        assert ids is not None
        assert tokenizer.decode(ids, special_tokens=True) == f"[INST]{rest['content']}[/INST]"
        rest = {"role": "user", "content": short_id(json.dumps([rest]), 32)}


def test_a_template_without_an_end_of_calls_cannot_be_continued(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}")
    chat = ChatFormat(load_tokenizer(tmp_path), "hermes")
    calling = [USER, Reply("", "", (WEATHER,)).message(), result(WEATHER, "blue")]
    assert chat.continuation(calling, TOOLS, 2, 0) is None
    save_chat_tokenizer(tmp_path, "{{ messages[-1].content }}")
    assert ChatFormat(load_tokenizer(tmp_path)).continuation([USER, Reply("so").message(), USER], (), 2, 0) is None


# What a template changes.


@each_family
def test_what_a_template_changes_is_said(name: str, model: Callable[[str], Model]) -> None:
    said = model(name).format.not_append_only()
    if not FAMILIES[name].changes:
        assert said == ""
    else:
        assert said.startswith(f"the chat template {FAMILIES[name].changes}: each ")
        assert said.endswith("agent.history=keep continues from the sampled tokens instead")


@each_family
def test_a_template_that_only_appends_does_so_in_a_conversation(name: str, model: Callable[[str], Model]) -> None:
    """Against transformers: the prompt of each call begins with the one before, and the reply, or else it is said."""
    whole = conversation(FAMILIES[name])
    calls = [i for i, message in enumerate(whole) if message["role"] == "assistant"]
    appended = True
    for call, following in zip(calls, [*calls[1:], len(whole)], strict=True):
        before = model(name).rendered(whole[:call], add_generation_prompt=True)
        reply = Reply(whole[call]["content"], whole[call].get("reasoning_content", ""))
        after = model(name).rendered(whole[:following], add_generation_prompt=True)
        behind = model(name).theirs.decode(after[len(before) :])
        appended &= after[: len(before)] == before and reply.content in behind and reply.reasoning in behind
    assert appended == (not FAMILIES[name].changes)


def test_the_cost_is_told_by_when_it_arises(model: Callable[[str], Model]) -> None:
    assert "each call after a new user message becomes a branch" in model("qwen3").format.not_append_only()
    assert "each later call of an episode becomes a branch" in model("hermes").format.not_append_only()


def test_a_template_may_begin_a_turn_in_another_way_than_it_shows_it(model: Callable[[str], Model]) -> None:
    """Qwen3 without thinking starts a turn with an empty block, which is gone from the history."""
    said = model("qwen2.5").format.not_append_only(options={"enable_thinking": False})
    assert said == ""
    said = model("qwen3").format.not_append_only(options={"enable_thinking": False})
    assert "the chat template does not begin earlier turns as it began them when they were sampled: each later" in said


# What is refused.


def test_refusals(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"agent\.tool_format=xml is not known; choose one of hermes, .*, plain"):
        ChatFormat(tokenizer, "xml")
    chat = ChatFormat(tokenizer)
    assert chat.tool_format == "plain"
    with pytest.raises(ChatError, match=r"has tools, and .* leave the tools out, or set agent\.tool_format"):
        chat.encode([USER], TOOLS)
    assert ChatFormat(tokenizer, "plain").encode([USER], TOOLS) == chat.encode([USER])
    named = ChatFormat(tokenizer, "hermes")
    said = tokenizer.encode_rendered('<tool_call>{"name": "search", "arguments": {}}</tool_call>')
    assert named.parse(said, TOOLS).tool_calls[0].name == "search"

    save_chat_tokenizer(tmp_path, "{% for %}")
    with pytest.raises(CheckpointError, match=r"Expected an expression.*; repair the template of the model"):
        ChatFormat(load_tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        ChatFormat(load_tokenizer(tmp_path))
