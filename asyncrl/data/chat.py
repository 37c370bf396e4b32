"""Chat templates: turns as the model was trained to see them, rendered the way transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.errors import CheckpointError

ROLES = ("user", "assistant")
MARKS = ("asyncrl-answer", "asyncrl-reply")
"""Stand for turns where only what is around them is of interest."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of one model, with the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = tokens

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self._source, {"raise_exception": _raise, "strftime_now": _now})

    def render(self, turns: Sequence[str], system: str = "") -> str:
        """The user's and the model's turns in alternation, up to where the model's next one begins."""
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": role, "content": turn} for role, turn in zip(cycle(ROLES), turns, strict=False)]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except TemplateError as error:
            raise CheckpointError(
                f"its chat template cannot be used: {error.message}; repair it, or set rollout.chat=false"
            ) from None

    @cached_property
    def around_turn(self) -> tuple[str, str]:
        """What stands before and after a turn of the user's that follows one of the model's."""
        shown = self.render(("question", *MARKS))
        _, found, behind = shown.partition(MARKS[0])
        opening, also_found, closing = behind.partition(MARKS[1])
        if not (found and also_found):
            raise CheckpointError("its chat template cannot show several turns; repair it, or set rollout.chat=false")
        return opening, closing


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template that transformers would take: a file of its own goes before tokenizer_config.json."""
    config, file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, _named_tokens(settings)) if source else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    given = {name: settings[name] for name in NAMED_TOKENS if settings.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up. Templates come with downloaded models, so they run in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for those who train on whole chats; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
