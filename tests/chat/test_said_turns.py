"""Turns of written conversations: the prompt is that of a call, the reply what the template writes, with its end."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from asyncrl.chat import Message, PlainFormat, chat_format
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.errors import ChatError
from tests.chat.test_chat_format import (
    SYSTEM,
    TEXTS,
    TOOLS,
    USER,
    Model,
    conversation,
    each_family,
)
from tests.chat.test_chat_format import model as model  # a fixture
from tests.support.tiny_chat import CHATML, END, START, save_chat_tokenizer


def assistant(messages: list[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


@each_family
def test_each_turn_is_that_of_a_call(name: str, model: Callable[[str], Model]) -> None:
    """Also where the template leaves out the reasoning of earlier turns: each is in the context that it had."""
    found = model(name)
    messages = conversation(found.family)
    turns = list(found.format.said_turns(messages, TOOLS, of=assistant(messages)))
    assert len(turns) == 3
    for number, turn in zip(assistant(messages), turns, strict=True):
        assert turn.prompt == found.rendered(messages[:number], add_generation_prompt=True)
        text = found.tokenizer.decode(found.rendered(messages[: number + 1]), special_tokens=True)
        assert text.rstrip().endswith(found.tokenizer.decode(turn.reply, special_tokens=True)), "as the template has it"
        assert turn.reply[-1] in found.tokenizer.eos_ids, "up to the end of the turn"
        said = found.format.parse(turn.reply, TOOLS, prompt=turn.prompt)
        message = messages[number]
        assert (said.content, said.reasoning) == (message["content"], message.get("reasoning_content", ""))
        assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]


@given(contents=st.lists(TEXTS, min_size=2, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-training", "llama3.1", "ministral"])
def test_where_a_template_only_appends_each_turn_goes_on_from_the_one_before(
    name: str, contents: list[str], model: Callable[[str], Model]
) -> None:
    found = model(name)
    messages: list[Message] = [
        {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    turns = list(found.format.said_turns(messages, of=assistant(messages)))
    for earlier, later in pairwise(turns):
        said = [*earlier.prompt, *earlier.reply]
        assert later.prompt[: len(said)] == said
    for number, turn in zip(assistant(messages), turns, strict=True):
        assert turn.prompt == found.rendered(messages[:number], tools=None, add_generation_prompt=True)
        whole = found.rendered(messages[: number + 1], tools=None)
        assert whole[: len(turn.prompt) + len(turn.reply)] == [*turn.prompt, *turn.reply]


def test_only_the_turns_that_are_wanted(model: Callable[[str], Model]) -> None:
    found = model("qwen2.5")
    messages = conversation(found.family)
    last = assistant(messages)[-1]
    (turn,) = found.format.said_turns(messages, TOOLS, of=[last])
    assert turn == list(found.format.said_turns(messages, TOOLS, of=assistant(messages)))[-1]


def test_calls_that_a_template_shows_one_by_one_are_turns_of_their_own(model: Callable[[str], Model]) -> None:
    """Llama's template refuses two calls in one message: the second's header is not what the model says."""
    found = model("llama3.1")
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "search", "arguments": f'{{"city": "{city}"}}'}}
        for i, city in enumerate(["Graz", "Linz"])
    ]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    turns = list(found.format.said_turns(messages, TOOLS, of=[1]))
    texts = [found.tokenizer.decode(turn.reply, special_tokens=True) for turn in turns]
    assert [text.count("<|eot_id|>") for text in texts] == [1, 1]
    assert all("header" not in text for text in texts)
    assert ["Graz" in texts[0], "Linz" in texts[1]] == [True, True]


def _tokenizer(directory: Path, template: str | None) -> Tokenizer:
    save_chat_tokenizer(directory, template)
    return load_tokenizer(directory)


def test_a_template_without_an_end_gets_the_models(tmp_path: Path) -> None:
    """As Alpaca's: what follows the end token in the next turn's prompt is what the template writes."""
    alpaca = (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    tokenizer = _tokenizer(tmp_path, alpaca)
    messages: list[Message] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["a", "b", "c", "d"])
    ]
    first, second = chat_format(tokenizer).said_turns(messages, of=[1, 3])
    assert tokenizer.decode(first.reply, special_tokens=True) == f"b{END}"
    assert tokenizer.decode(second.prompt) == "### user:\na\n\n### assistant:\nb\n\n### user:\nc\n\n### assistant:\n"
    assert tokenizer.decode(second.reply, special_tokens=True) == f"d{END}"


def test_a_template_that_begins_a_turn_in_another_way_is_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, CHATML.replace("'assistant\n'", "'assistant\n<think>\n'"))
    with pytest.raises(ChatError, match="does not begin a turn of the history as it begins one that is sampled"):
        list(chat_format(tokenizer).said_turns([USER, {"role": "assistant", "content": "x"}], of=[1]))


def test_where_two_texts_meet_no_call_begins_with_half_a_token(tmp_path: Path) -> None:
    """The tokenizer makes one token of the newline before the reply and the one that it begins with."""
    save_chat_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    backend.model = models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    messages: list[Message] = [
        USER,
        {"role": "assistant", "content": "\nyes"},
        USER,
        {"role": "assistant", "content": "no"},
    ]
    turns = list(chat_format(tokenizer).said_turns(messages, of=[1, 3]))
    for number, turn in zip((1, 3), turns, strict=True):
        assert turn.prompt == chat_format(tokenizer).encode(messages[:number])
    assert [tokenizer.decode(turn.reply, special_tokens=True) for turn in turns] == [f"\nyes{END}", f"no{END}"]
    assert len(turns[1].prompt) < len(turns[0].prompt) + len(turns[0].reply) + len(
        tokenizer.encode_rendered(f"\n{START}user\n{USER['content']}{END}\n{START}assistant\n")
    ), "the history is tokenized as a call's is"


def test_without_a_template_the_model_ends_its_turns_itself(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, None)
    chat = chat_format(tokenizer)
    assert isinstance(chat, PlainFormat)
    messages: list[Message] = [
        USER,
        {"role": "assistant", "content": "yes"},
        USER,
        {"role": "assistant", "content": "no"},
    ]
    turns = list(chat.said_turns(messages, of=[1, 3]))
    assert [turn.prompt for turn in turns] == [chat.encode(messages[:number]) for number in (1, 3)]
    assert [tokenizer.decode(turn.reply, special_tokens=True) for turn in turns] == [f"yes{END}", f"no{END}"]
    with pytest.raises(ChatError, match="leave them out"):
        list(chat.said_turns([SYSTEM, *messages], TOOLS, of=[2]))
