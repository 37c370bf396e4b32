"""Prompts from a JSON-lines file."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.tasks.rows import Rows, check_columns, make_prompt
from asyncrl.tasks.settings import CodeTask, JsonlTask
from asyncrl.types import Prompt


class Lines(Rows, ABC):
    """The lines of a file, each a JSON object."""

    EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
    """A line as it should be, for who wrote another."""

    def __init__(self, settings: JsonlTask | CodeTask, seed: int) -> None:
        super().__init__(self._read(Path(settings.path)), settings.held_out, seed, settings.path)

    @abstractmethod
    def _decode(self, line: bytes, uid: str) -> Prompt: ...

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
            return self._decode(line, f"{path.name}:{number}")
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; expected an object such as {self.EXAMPLE}") from None


class Jsonl(Lines):
    """Questions and, where the reward needs them, answers."""

    def __init__(self, settings: JsonlTask, seed: int) -> None:
        self._columns = settings
        super().__init__(settings, seed)

    def _decode(self, line: bytes, uid: str) -> Prompt:
        row = msgspec.json.decode(line, type=dict[str, Any])
        check_columns(self._columns, list(row))
        return make_prompt(row[self._columns.prompt], row.get(self._columns.answer_column), uid)
