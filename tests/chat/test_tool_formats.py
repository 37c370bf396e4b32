"""Tool calls in each format: what is read, what stays text, and that nothing a model writes is an error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.chat.tool_formats import TOOL_FORMATS, Call

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
F = Call("f", '{"a": 1}')
G = Call("g", "{}")
WRITTEN = '{"name": "f", "arguments": {"a": 1}}'

READ = [
    ("hermes", f"<tool_call>\n{WRITTEN}\n</tool_call>", "", [F]),
    ("hermes", f"Hm.\n<tool_call>\n{WRITTEN}\n</tool_call>", "Hm.", [F]),
    ("hermes", f"Hm.\n\n<tool_call>{WRITTEN}</tool_call>", "Hm.\n", [F]),
    ("hermes", f'<tool_call>{WRITTEN}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', "", [F, G]),
    ("hermes", f'<tool_call>{WRITTEN}</tool_call>\nand\n<tool_call>{{"name": "g"}}</tool_call>.', "\nand\n.", [F, G]),
    ("hermes", f"<tool_call>{WRITTEN}", "", [F]),  # cut off behind the call
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [G]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [Call("f", '{"a": "</tool_call>"}')],
    ),
    (
        "hermes",
        f"<tool_call>nonsense</tool_call>\n<tool_call>{WRITTEN}</tool_call>",
        "<tool_call>nonsense</tool_call>",
        [F],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=zip>\n8010\n</parameter>\n<parameter=n>\n5\n</parameter>\n<parameter=l>\n"
        '["x"]\n</parameter>\n<parameter=t>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>',
        "",
        [Call("f", '{"zip": "8010", "n": 5, "l": ["x"], "t": "two\\nlines"}')],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=a>\n1e999\n</parameter>\n<parameter=b>\n"\\ud800"\n</parameter>\n'
        "<parameter=c>\n[-1e999, NaN]\n</parameter>\n<parameter=d>\n123456789012345678901\n</parameter>\n</function>",
        "",
        [Call("f", '{"a": "1e999", "b": "\\"\\\\ud800\\"", "c": "[-1e999, NaN]", "d": 123456789012345678901}')],
    ),  # no JSON that others could read
    ("qwen3_coder", "So.\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>", "So.", [G]),
    ("qwen3_coder", "<tool_call><function=g></function>", "", [G]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", 'Let me look.<|python_tag|>{"name": "g", "parameters": {}}', "Let me look.", [G]),
    ("mistral", f"[TOOL_CALLS] [{WRITTEN}]", "", [F]),
    (
        "mistral",
        'Well[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdef123"}, {"name": "g"}]',
        "Well",
        [Call("f", '{"a": 1}', "abcdef123"), G],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{}',
        "",
        [F, Call("g", "{}", "abcdef123")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F]),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', "", [F]),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", [F]),
    (
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        "I will look.",
        [F],
    ),
    ("plain", f"<tool_call>{WRITTEN}</tool_call>", f"<tool_call>{WRITTEN}</tool_call>", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), READ)
def test_calls_are_read(name: str, text: str, content: str, calls: list[Call]) -> None:
    found = TOOL_FORMATS[name].parse(text, TOOLS)
    assert (found.content, list(found.calls), found.reasoning) == (content, calls, "")


TEXT = [
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", f"<tool_call>{WRITTEN} and more</tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=zip>\n80"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nloose text</function>\n</tool_call>"),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}} is the call.'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", f"[TOOL_CALLS] [{WRITTEN}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
    ("mistral", "[TOOL_CALLS]"),
    ("harmony", "Just a text"),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": '),
]


@pytest.mark.parametrize(("name", "text"), TEXT)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    found = TOOL_FORMATS[name].parse(text, TOOLS)
    assert (found.content, list(found.calls), found.reasoning) == (text, [], "")


def test_channels_of_harmony() -> None:
    parse = TOOL_FORMATS["harmony"].parse
    said = "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parse(said, ()) == ("Yes.", [], "First.")
    assert parse("<|channel|>analysis<|message|>Fir", ()) == ("", [], "Fir")
    assert parse("<|channel|>ana", ()) == ("<|channel|>ana", [], "")


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=n>", "</parameter>", "<think>",
    "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|channel|>", "<|message|>",
    "<|start|>assistant", "<|end|>", "<|constrain|>", "analysis", " to=functions.f", "{", "}", "[", "]", ";", ", ",
    "\n", '"name": ', '"f"', '"arguments": ', '"parameters": ', "{}", "null", "1", "NaN", "f", WRITTEN, '{"a": 1}',
    "1e999", '"\\ud800"',
])  # fmt: skip


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=st.lists(PIECES | st.text(max_size=5), max_size=15).map("".join))
def test_nothing_that_is_written_is_an_error(name: str, text: str) -> None:
    found = TOOL_FORMATS[name].parse(text, TOOLS)
    for call in found.calls:
        assert call.name
        assert isinstance(msgspec.json.decode(call.arguments), dict)  # stricter than Python's
    if not found.calls and name != "harmony":
        assert found.content == text
