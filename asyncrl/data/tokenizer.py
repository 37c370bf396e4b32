"""Text to token ids and back, from the files of a Hugging Face model directory, with the `tokenizers` package alone.

Chats are rendered by the model's own template the way transformers renders them, without transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, decoders, models, pre_tokenizers

from asyncrl.config import Rollout
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.types import Prompt

PAD = "<pad>"
ROLES = ("user", "assistant")
MARKS = ("asyncrl-answer", "asyncrl-reply")
"""Stand for turns where only what is around them is of interest."""
DICT_ATTRIBUTES = frozenset(dir(dict))
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The template of one model, with the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str], with_tools: str = "") -> None:
        self._source = source
        self._tokens = tokens
        self._source_with_tools = with_tools
        """Some models have a template of its own for calls with tools."""

    def mentions(self, text: str) -> bool:
        return text in self._source or text in self._source_with_tools

    @cached_property
    def _template(self) -> Template:
        return _compiled(self._source)

    @cached_property
    def _template_with_tools(self) -> Template:
        return _compiled(self._source_with_tools) if self._source_with_tools else self._template

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        open_turn: bool = True,
    ) -> str:
        """What transformers' apply_chat_template makes of the same; errors are the template's own.

        `variables` are for the template, such as `enable_thinking`. With `open_turn` the text goes on to where the
        model's next turn begins.
        """
        template = self._template_with_tools if tools else self._template
        given = {"documents": None, **self._tokens, **variables, "messages": list(messages)}
        return template.render(given, tools=list(tools) or None, add_generation_prompt=open_turn)

    def render(self, turns: Sequence[str], system: str = "") -> str:
        """The user's and the model's turns in alternation, up to where the model's next one begins."""
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": role, "content": turn} for role, turn in zip(cycle(ROLES), turns, strict=False)]
        try:
            return self.render_messages(messages)
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
    named = {"default": source}
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
    source = named.get("default")
    return ChatTemplate(source, _named_tokens(settings), named.get("tool_use") or "") if source else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    given = {name: settings[name] for name in NAMED_TOKENS if settings.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}


def _compiled(source: str) -> Template:
    return _environment().from_string(source, {"raise_exception": _raise, "strftime_now": _now})


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's own, faster at what chat templates do for every message: `message.role`, `loop.first`, `text.strip`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The same; a key that no attribute of a dict hides is looked up at once."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The same; jinja2 decides by the object's type and the name, so once is enough."""
        found = self._safe.get((type(obj), attr))
        if found is None:
            found = self._safe[type(obj), attr] = super().is_safe_attribute(obj, attr, value)
        return found


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up. Templates come with downloaded models, so they run in a sandbox."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
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


class Tokenizer:
    """A tokenizer, the ids that end a completion and the chat template, if there is one."""

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...], chat: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self.eos_ids = eos_ids
        self._chat = chat

    @property
    def size(self) -> int:
        return self._backend.get_vocab_size()

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, added ones too."""
        return self._backend.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model's own tokenizer puts around a text."""
        return self._backend.encode(text).ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that holds all its special tokens, as chat templates write them."""
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    @property
    def chat_template(self) -> ChatTemplate:
        if self._chat is None:
            raise CheckpointError(
                "it has no chat template; set rollout.chat=false, or put the model's chat_template.jinja beside its "
                "tokenizer.json"
            )
        return self._chat

    def encode_prompt(self, prompt: Prompt, rollout: Rollout) -> list[int]:
        """Ids of a prompt as the run shows it to the model."""
        return self.encode_prompts([prompt], rollout)[0]

    def encode_prompts(self, prompts: Sequence[Prompt], rollout: Rollout) -> list[list[int]]:
        """The same for several. Other threads go on meanwhile: `tokenizers` lets go of the lock only for batches."""
        shown = [self._shown(prompt, rollout) for prompt in prompts]  # a template writes special tokens itself
        try:
            found = self._backend.encode_batch_fast(shown, add_special_tokens=not rollout.chat)
        except Exception as error:  # `tokenizers` raises nothing narrower for text that the model has no token for
            raise ConfigError(self._unknown(prompts, shown, error)) from None
        return [each.ids for each in found]

    def _unknown(self, prompts: Sequence[Prompt], shown: Sequence[str], error: Exception) -> str:
        """Which prompt cannot be written in the model's tokens, and for want of which character."""
        for prompt, text in zip(prompts, shown, strict=True):
            if not self._writes(text):
                lacking = next((letter for letter in dict.fromkeys(text) if not self._writes(letter)), "")
                why = f"for {lacking!r}" if lacking else f"({error})"
                return (
                    f"prompt {prompt.uid}: the model's tokenizer has no token {why}; change {text!r:.100}, or take a "
                    "model that knows it"
                )
        return f"the model's tokenizer refuses a prompt: {error}"

    def _writes(self, text: str) -> bool:
        try:
            self._backend.encode(text, add_special_tokens=False)
        except Exception:
            return False
        return True

    def _shown(self, prompt: Prompt, rollout: Rollout) -> str:
        if rollout.chat:
            return self.chat_template.render((*prompt.earlier, prompt.text), rollout.system)
        if prompt.earlier:
            raise ConfigError(f"prompt {prompt.uid} has earlier turns of a chat: set rollout.chat=true")
        return prompt.text

    def encode_turn(self, text: str, rollout: Rollout, *, after: int) -> list[int] | str:
        """Ids of what is said to the model after its turn, up to where its next one begins, or why there are none.

        `after` is the last token of the turn: where it is the template's own end, it is not written twice.
        """
        opening, closing = self._around_turn(rollout)
        try:
            ids = self._backend.encode(f"{opening}{text}{closing}", add_special_tokens=False).ids
        except Exception as error:  # `tokenizers` raises nothing narrower for text that the model has no token for
            return f"{text!r:.200} cannot be written in the model's tokens: {error}"
        return ids[1:] if rollout.chat and ids[0] == after else ids

    def decode_turn(self, ids: list[int], rollout: Rollout) -> str:
        """The text that `encode_turn` was given."""
        opening, closing = self._around_turn(rollout)
        shown = self._backend.decode(ids, skip_special_tokens=False).removesuffix(closing)
        # The opening may lack its first token.
        return next(shown[len(opening) - i :] for i in range(len(opening) + 1) if shown.startswith(opening[i:]))

    def _around_turn(self, rollout: Rollout) -> tuple[str, str]:
        if not rollout.chat:
            return "", ""
        return self.chat_template.around_turn

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text, without special tokens unless they are asked for."""
        return self._backend.decode(ids, skip_special_tokens=not special_tokens)


def load_tokenizer(path: str | Path) -> Tokenizer:
    directory = Path(path)
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; a model directory must hold tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(file))
    # Files often carry the truncation and padding of their last use.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, _eos_ids(directory, backend), load_chat_template(directory))


def character_vocabulary(characters: str, eos: str) -> dict[str, int]:
    """A token for each character, padding as id 0 and `eos` as id 1."""
    return {token: i for i, token in enumerate([PAD, eos, *characters])}


def save_character_tokenizer(directory: str | Path, characters: str, eos: str, max_length: int) -> Tokenizer:
    """Write a tokenizer with one token per character in Hugging Face layout.

    The end is no special token to `tokenizers`, so decoded completions show whether they came to one.
    """
    vocabulary = character_vocabulary(characters, eos)
    # Without an unknown token a foreign character is refused, not replaced.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD])
    directory = Path(directory)
    (directory / "tokenizer.json").write_text(backend.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": eos,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Tokenizer(backend, (vocabulary[eos],))


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The first file that names an end decides, in the order in which transformers' generate asks them."""
    for name in ("generation_config.json", "config.json"):
        match _read(directory / name).get("eos_token_id"):
            case int(token):
                return (token,)
            case [*tokens] if tokens:
                return tuple(tokens)
            case _:
                pass
    match _read(directory / "tokenizer_config.json").get("eos_token"):
        case str(text) | {"content": str(text)} if (token := backend.token_to_id(text)) is not None:
            return (token,)
        case _:
            raise CheckpointError(f"{directory} names no end token; add eos_token_id to its generation_config.json")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}
