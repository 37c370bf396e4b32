"""Text to token ids and back, from the files of a Hugging Face model directory, with the `tokenizers` package alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from asyncrl.config import Rollout
from asyncrl.data.chat import ChatTemplate, load_chat_template
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.types import Prompt

PAD = "<pad>"


class Tokenizer:
    """A tokenizer, the ids that end an answer and the chat template, if there is one."""

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: tuple[int, ...], chat: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self.eos_ids = eos_ids
        self._chat = chat

    @property
    def size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model's own tokenizer puts around a text."""
        return self._backend.encode(text).ids

    def _template(self) -> ChatTemplate:
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
        found = self._backend.encode_batch_fast(shown, add_special_tokens=not rollout.chat)
        return [each.ids for each in found]

    def _shown(self, prompt: Prompt, rollout: Rollout) -> str:
        if rollout.chat:
            return self._template().render((*prompt.earlier, prompt.text), rollout.system)
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
        return self._template().around_turn

    def decode(self, ids: list[int]) -> str:
        """The text without special tokens."""
        return self._backend.decode(ids)


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


def save_character_tokenizer(directory: str | Path, characters: str, eos: str, max_length: int) -> Tokenizer:
    """Write a tokenizer with one token per character, padding as id 0 and `eos` as id 1, in Hugging Face layout.

    The end is no special token to `tokenizers`, so decoded answers show whether they came to one.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, eos, *characters])}
    # Without an unknown token a foreign character is refused, not replaced.
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD])
    directory = Path(directory)
    backend.save(str(directory / "tokenizer.json"))
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
