"""Prompts from a JSON-lines file."""

import math
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Split
from asyncrl.tasks.settings import CodeTask, JsonlTask
from asyncrl.types import Prompt


class Row(msgspec.Struct, frozen=True):
    """One line of the file."""

    prompt: str
    answer: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("`prompt` is empty")


class Jsonl:
    """The rows of a file, epoch after epoch, each epoch in another order."""

    EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
    """A line as it should be, for who wrote another."""

    def __init__(self, settings: JsonlTask | CodeTask, seed: int) -> None:
        prompts = self._read(Path(settings.path))
        held_out = _held_out({prompt.text for prompt in prompts}, settings.held_out)
        self._settings = settings
        self._seed = seed
        self._prompts: dict[Split, list[Prompt]] = {
            "train": [prompt for prompt in prompts if prompt.text not in held_out],
            "held_out": [prompt for prompt in prompts if prompt.text in held_out],
        }
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def prompt(self, split: Split, index: int) -> Prompt:
        prompts = self._prompts[split]
        if not prompts:
            raise ConfigError(
                f"task.held_out={self._settings.held_out} leaves no held-out prompt in {self._settings.path}: "
                "raise task.held_out or set evaluation.prompts=0"
            )
        epoch, position = divmod(index, len(prompts))
        return prompts[self._order(split, epoch)[position]]

    def _shuffle(self, split: Split, epoch: int) -> list[int]:
        order = list(range(len(self._prompts[split])))
        Random(f"{self._seed}/{split}/{epoch}").shuffle(order)
        return order

    def _decode(self, line: bytes) -> Row:
        return msgspec.json.decode(line, type=Row)

    def _read(self, path: Path) -> list[Prompt]:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"task.path={path} cannot be read: {error.strerror}") from None
        prompts = [self._parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not prompts:
            raise ConfigError(f"task.path={path} holds no prompt; write one JSON object with `prompt` per line")
        return prompts

    def _parse(self, path: Path, number: int, line: bytes) -> Prompt:
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; expected an object such as {self.EXAMPLE}") from None
        return Prompt(uid=f"{path.name}:{number}", text=row.prompt, answer=row.answer)


def _held_out(texts: set[str], share: float) -> set[str]:
    """The same texts whatever the seed and the order of the file; one at least is left to train on."""
    ranked = sorted(texts, key=lambda text: blake2b(text.encode()).digest())
    return set(ranked[: min(math.ceil(share * len(ranked)), len(ranked) - 1)])
