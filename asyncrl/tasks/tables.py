"""Prompts from a finite table: rows that somebody else wrote, epoch after epoch, each epoch in another order.

`Rows` is what all tables share; then JSON lines, Parquet and Hugging Face datasets.
"""

import codecs
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pyarrow
from pyarrow import parquet

from asyncrl.config.errors import did_you_mean
from asyncrl.config.task import CodeTask, Columns, DatasetTask, JsonlTask, ParquetTask
from asyncrl.errors import ConfigError
from asyncrl.system.optional import require
from asyncrl.tasks.base import Split
from asyncrl.types import Prompt

pa, pq = cast(Any, pyarrow), cast(Any, parquet)  # their type stubs are incomplete


class Rows:
    """A list of prompts; `source` is what errors call the place they come from."""

    def __init__(self, prompts: Sequence[Prompt], held_out: float, seed: int, source: str) -> None:
        kept = _held_out({prompt.text for prompt in prompts}, held_out)
        self._share, self._source, self._seed = held_out, source, seed
        self._prompts: dict[Split, list[Prompt]] = {
            "train": [prompt for prompt in prompts if prompt.text not in kept],
            "held_out": [prompt for prompt in prompts if prompt.text in kept],
        }
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def prompt(self, split: Split, index: int) -> Prompt:
        prompts = self._prompts[split]
        if not prompts:
            raise ConfigError(
                f"task.held_out={self._share} leaves no held-out prompt in {self._source}: "
                "raise task.held_out or set evaluation.prompts=0"
            )
        epoch, position = divmod(index, len(prompts))
        return prompts[self._order(split, epoch)[position]]

    def count(self, split: Split) -> int:
        return len(self._prompts[split])

    def listed(self, most: int) -> Sequence[Prompt]:
        return [prompt for split in self._prompts.values() for prompt in split][:most]

    def _shuffle(self, split: Split, epoch: int) -> list[int]:
        order = list(range(len(self._prompts[split])))
        Random(f"{self._seed}/{split}/{epoch}").shuffle(order)
        return order


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


def _held_out(texts: set[str], share: float) -> set[str]:
    """The same texts whatever the seed and the order of the file; one at least is left to train on."""
    ranked = sorted(texts, key=lambda text: blake2b(text.encode()).digest())
    return set(ranked[: min(math.ceil(share * len(ranked)), len(ranked) - 1)])


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
            raw = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"task.path={path} cannot be read: {error.strerror}") from None
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError(f"task.path={path} is UTF-16: convert it with `iconv -f utf-16 -t utf-8`")
        raw = raw.removeprefix(codecs.BOM_UTF8)
        items = _array(raw)
        what, lines = ("line", raw.splitlines()) if items is None else ("item", items)
        numbered = enumerate(lines, start=1)
        prompts = [
            self._parse(f"{path}, {what} {number}", path, number, line) for number, line in numbered if line.strip()
        ]
        if not prompts:
            raise ConfigError(f"task.path={path} holds no prompt; write one JSON object with `prompt` per line")
        return prompts

    def _parse(self, place: str, path: Path, number: int, line: bytes) -> Prompt:
        try:
            line.decode()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise ConfigError(
                f"{place}: not UTF-8 at byte {error.start + 1} (0x{byte:02x}, {chr(byte)!r} in Latin-1): convert the "
                "file, as with `iconv -f latin1 -t utf-8`"
            ) from None
        try:
            return self._decode(line, f"{path.name}:{number}")
        except (msgspec.DecodeError, ValueError) as error:
            whole = ", all of it on one line" if "truncated" in str(error) else ""
            raise ConfigError(f"{place}: {error}; expected an object such as {self.EXAMPLE}{whole}") from None


def _array(raw: bytes) -> list[bytes] | None:
    """The items of a file that is one JSON array, as some programs write it; None if it is none."""
    if not raw.lstrip().startswith(b"["):
        return None
    try:
        return [bytes(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, UnicodeDecodeError):  # its lines say where it is wrong
        return None


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
    path = Path(settings.path).expanduser()
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"task.path={path} is a directory without a .parquet file")
    rows = (row for file in files for row in _rows(file, settings))
    return make_prompts(rows, settings, path.name)


def _rows(file: Path, settings: ParquetTask) -> list[dict[str, Any]]:
    """Only the columns that are asked for."""
    try:
        with pq.ParquetFile(file) as opened:
            columns = check_columns(settings, opened.schema_arrow.names)
            return opened.read(columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"task.path={file} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"task.path={file}: {error}") from None


class Dataset(Rows):
    """Of the Hugging Face hub, or a directory that `save_to_disk` wrote."""

    def __init__(self, settings: DatasetTask, seed: int) -> None:
        super().__init__(_read_dataset(settings), settings.held_out, seed, settings.name)


def _read_dataset(settings: DatasetTask) -> list[Prompt]:
    data = _split(settings, _load(settings))
    try:
        columns = check_columns(settings, data.column_names)
    except ValueError as error:
        raise ConfigError(f"task.name={settings.name}: {error}") from None
    return make_prompts(data.select_columns(columns), settings, f"{Path(settings.name).name}/{settings.split}")


def _load(settings: DatasetTask) -> Any:
    datasets = require("datasets", extra="datasets")
    path = Path(settings.name).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(settings.name, settings.config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"task.name={settings.name} cannot be loaded: {error}; give a dataset of the hub, or a directory that "
            "save_to_disk wrote"
        ) from None


def _split(settings: DatasetTask, data: Any) -> Any:
    """One split of several; a saved dataset may also have none."""
    if not isinstance(data, dict):
        return data
    if settings.split not in data:
        raise ConfigError(
            f"task.name={settings.name} has no split {settings.split!r}: {did_you_mean(settings.split, data)}"
        )
    return data[settings.split]
