"""Chat templates: token for token what transformers makes of the same files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.config import Rollout
from asyncrl.data.tokenizer import ChatTemplate, load_tokenizer
from asyncrl.errors import CheckpointError
from asyncrl.types import Prompt
from tests.support.tiny_chat import CHATML, END, START, chat_ids, save_chat_tokenizer

TEMPLATES = {
    "chatml": CHATML,
    "trimmed blocks": """
    {%- if messages[0].role == 'system' %}
        {%- set system = messages[0].content %}
        {%- set messages = messages[1:] %}
    {%- endif %}
{{ bos_token }}{{ system | default('none') | trim }}
    {% for message in messages %}
        {%- if message.role == 'nobody' %}{% continue %}{% endif %}
<{{ message.role }}>{{ message.content | tojson }}
    {% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
""",
    "what transformers adds": (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{{ unk_token }}{% endfor %}{{ ns.last }}{{ strftime_now('%Y') }}"
        "{% if tools is not none or documents is not none %}{{ raise_exception('no tools here') }}{% endif %}"
    ),
}
ADDRESS = re.compile(r"0x[0-9a-f]+")
CHAT, HI = Rollout(chat=True), Prompt(uid="", text="Hi")
QUESTIONS = ["1 + 1 =", "  blanks\n\n\tand\nlines  ", f"<b>ünïcödé</b> & 'quotes' {START}user {END}"]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("question", QUESTIONS)
def test_ids_are_those_of_transformers(tmp_path: Path, template: str, system: str, question: str) -> None:
    save_chat_tokenizer(tmp_path, template)
    prompt = Prompt(uid="", text=question, earlier=("2 + 2 =", " 4 "))
    ours = load_tokenizer(tmp_path).encode_prompt(prompt, Rollout(chat=True, system=system))
    assert ours == chat_ids(tmp_path, *prompt.earlier, question, system=system)


@pytest.mark.parametrize(
    "listed", [CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_the_template_may_stand_in_the_tokenizers_config(tmp_path: Path, listed: object) -> None:
    save_chat_tokenizer(tmp_path, None)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": listed}))
    assert load_tokenizer(tmp_path).encode_prompt(HI, CHAT) == chat_ids(tmp_path, "Hi")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")  # a file of its own goes first
    assert load_tokenizer(tmp_path).encode_prompt(HI, CHAT) == load_tokenizer(tmp_path).encode("Hi")


def test_a_prompt_is_encoded_as_the_run_says(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompt = Prompt(uid="", text="Hi", earlier=("2 + 2 =", "4"))
    assert tokenizer.encode_prompt(HI, Rollout()) == tokenizer.encode("Hi")
    assert tokenizer.decode(tokenizer.encode_prompt(prompt, Rollout(chat=True, system="S"))) == (
        "system\nS\nuser\n2 + 2 =\nassistant\n4\nuser\nHi\nassistant\n"  # special tokens are not text
    )


def test_prompts_are_encoded_together_as_one_by_one(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompts = [Prompt(uid="", text=text) for text in ("Hi", "2 + 2 =", "Hi Hi 4", "")]
    assert tokenizer.encode_prompts(prompts, Rollout()) == [tokenizer.encode(prompt.text) for prompt in prompts]
    chats = [chat_ids(tmp_path, prompt.text, system="S") for prompt in prompts]
    assert tokenizer.encode_prompts(prompts, Rollout(chat=True, system="S")) == chats


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template; set rollout.chat=false"),
        ("{{ raise_exception('system role not supported') }}", "cannot be used: system role not supported"),
        ("{% for %}", "cannot be used: "),
        ("{{ messages.append(1) }}", "cannot be used: "),
        ("{{ ''.__class__.__mro__ }}", "cannot be used: "),
    ],
)
def test_refusals(tmp_path: Path, template: str | None, said: str) -> None:
    save_chat_tokenizer(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hi")  # without a chat nobody looks at the template
    with pytest.raises(CheckpointError, match=said):
        tokenizer.encode_prompt(HI, CHAT)


ACCESSES = [
    "m.role", "m.absent", "m.absent is defined", "m.absent.deeper", "m.items() | list", "m.copy", "m['items']",
    "m._private", "m.__class__", "m.content.strip()", "m.content.__class__.__mro__", "m.update({})",
    "m.content.format(m)", "ns.seen", "ns.absent is defined", "ns.__class__", "ns.__init__", "messages.append(m)",
    "messages.index(m)", "m.calls[0].name", "'{0.__class__}'.format(m)", "cycler.__init__", "m.update is defined",
    "m.fromkeys('ab')", "m.items.__self__",
]  # fmt: skip


@pytest.mark.parametrize("access", ACCESSES)
def test_templates_reach_what_the_sandbox_of_jinja2_lets_them(access: str) -> None:
    message = {"role": "user", "content": " {0} ", "calls": [{"name": "f"}]}
    message |= {"items": "hidden", "_private": "mine", "__class__": "faked"}
    source = "{% set ns = namespace(seen=1) %}{% for m in messages %}[{{ " + access + " }}]{% endfor %}"
    messages = [message, {**message, "role": "assistant"}]  # the second meets what was decided for the first

    def outcome(render: Callable[[], str]) -> str:
        try:
            return ADDRESS.sub("", render())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    theirs = ImmutableSandboxedEnvironment().from_string(source)
    ours = ChatTemplate(source, {})
    expected = outcome(lambda: theirs.render(messages=messages))
    assert [outcome(lambda: ours.render_messages(messages)) for _ in range(2)] == [expected] * 2
