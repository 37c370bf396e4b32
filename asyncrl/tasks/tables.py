"""Prompts from a finite table: rows that somebody else wrote, epoch after epoch, each epoch in another order.

`Rows` is what all tables share; then JSON lines, Parquet and Hugging Face datasets.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncrl.config.errors import did_you_mean
from asyncrl.config.task import CodeTask, Columns, DatasetTask, JsonlTask, ParquetTask
from asyncrl.data import rows as reading
from asyncrl.data.order import Order, kept_out
from asyncrl.errors import ConfigError
from asyncrl.tasks.base import Split
from asyncrl.types import Prompt


class Rows:
    """A list of prompts; `source` is what errors call the place they come from."""

    def __init__(self, prompts: Sequence[Prompt], held_out: float, seed: int, source: str) -> None:
        kept = kept_out({prompt.text.encode() for prompt in prompts}, held_out)
        self._share, self._source = held_out, source
        self._prompts: dict[Split, list[Prompt]] = {
            "train": [prompt for prompt in prompts if prompt.text.encode() not in kept],
            "held_out": [prompt for prompt in prompts if prompt.text.encode() in kept],
        }
        self._orders = {split: Order(len(found), seed, split) for split, found in self._prompts.items()}

    def prompt(self, split: Split, index: int) -> Prompt:
        prompts = self._prompts[split]
        if not prompts:
            lacks, way_out = {
                "train": ("prompt to train on", "lower task.held_out"),
                "held_out": ("held-out prompt", "raise task.held_out or set evaluation.prompts=0"),
            }[split]
            raise ConfigError(f"task.held_out={self._share} leaves no {lacks} in {self._source}: {way_out}")
        return prompts[self._orders[split][index]]

    def count(self, split: Split) -> int:
        return len(self._prompts[split])

    def listed(self, most: int) -> Sequence[Prompt]:
        return [prompt for split in self._prompts.values() for prompt in split][:most]


def check_columns(columns: Columns, known: Sequence[str]) -> list[str]:
    """The columns to read, or ValueError with those that exist."""
    wanted = {"task.prompt": columns.prompt} | ({"task.answer": columns.answer} if columns.answer else {})
    for field, name in wanted.items():
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"no column {name!r}: {meant}; set {field} to one of {', '.join(sorted(known))}")
    optional = [columns.answer_column] if columns.answer_column in known else []
    return list(dict.fromkeys([*wanted.values(), *optional]))


def make_prompts(rows: Iterable[Mapping[str, Any]], columns: Columns, source: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, row in enumerate(rows, start=1):
        try:
            prompts.append(make_prompt(row[columns.prompt], row.get(columns.answer_column), f"{source}:{number}"))
        except ValueError as error:
            raise ConfigError(f"{source}, row {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"{source} holds no prompt")
    return prompts


def make_prompt(prompt: Any, answer: Any, uid: str) -> Prompt:
    """From a text, or from a chat as a list of {"role": ..., "content": ...} that ends with the user; or ValueError."""
    if prompt is None or isinstance(prompt, bool | int | float):
        raise ValueError(f"the prompt is {json.dumps(prompt)}, and not a text: write it in quotes")
    turns = [prompt] if isinstance(prompt, str) else _turns(prompt)
    if not turns[-1]:
        raise ValueError("the prompt is empty")
    return Prompt(uid=uid, text=turns[-1], answer=_text(answer), earlier=tuple(turns[:-1]))


def _turns(prompt: Any) -> list[str]:
    messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    alternating = [("user", "assistant")[index % 2] for index in range(len(roles))]
    if len(roles) % 2 == 0 or roles != alternating:
        system = "; a system message belongs into rollout.system" if "system" in roles else ""
        raise ValueError(
            f'{prompt!r:.200} is neither a text nor a chat such as [{{"role": "user", "content": "1+1="}}] of '
            f"the user's and the assistant's turns, the user's last{system}"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(content := message.get("content"), str):
            raise ValueError(f"the content of message {number} is {content!r:.200}, and not a text")
    return [message["content"] for message in messages]


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


class Lines(Rows, ABC):
    """The lines of a file, each a JSON object."""

    EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'
    """A line as it should be, for who wrote another."""

    def __init__(self, settings: JsonlTask | CodeTask, seed: int) -> None:
        super().__init__(self._read(Path(settings.path)), settings.held_out, seed, settings.path)

    @abstractmethod
    def _decode(self, line: bytes, uid: str) -> Prompt: ...

    def _read(self, path: Path) -> list[Prompt]:
        prompts = [line.read(self._decode, self.EXAMPLE) for line in reading.read_lines(path, "task.path")]
        if not prompts:
            raise ConfigError(f"task.path={path} holds no prompt; write one JSON object with `prompt` per line")
        return prompts


class Jsonl(Lines):
    """Prompts and, where the reward needs them, references."""

    def __init__(self, settings: JsonlTask, seed: int) -> None:
        self._columns = settings
        super().__init__(settings, seed)

    def _decode(self, line: bytes, uid: str) -> Prompt:
        row = msgspec.json.decode(line, type=dict[str, Any])
        check_columns(self._columns, list(row))
        return make_prompt(row[self._columns.prompt], row.get(self._columns.answer_column), uid)


class Parquet(Rows):
    """A file, or all of a directory."""

    def __init__(self, settings: ParquetTask, seed: int) -> None:
        super().__init__(_read_parquet(settings), settings.held_out, seed, settings.path)


def _read_parquet(settings: ParquetTask) -> list[Prompt]:
    path, columns = Path(settings.path).expanduser(), partial(check_columns, settings)
    files = reading.parquet_files(path, "task.path")
    rows = (row for file in files for row in reading.read_parquet(file, "task.path", columns))
    return make_prompts(rows, settings, path.name)


class Dataset(Rows):
    """Of the Hugging Face hub, or a directory that `save_to_disk` wrote."""

    def __init__(self, settings: DatasetTask, seed: int) -> None:
        super().__init__(_read_dataset(settings), settings.held_out, seed, settings.name)


def _read_dataset(settings: DatasetTask) -> list[Prompt]:
    columns = partial(check_columns, settings)
    rows = reading.read_dataset(settings.name, settings.config, settings.split, "task.name", columns)
    return make_prompts(rows, settings, f"{Path(settings.name).name}/{settings.split}")
