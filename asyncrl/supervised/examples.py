"""The examples of a supervised start: read once, tokenized once, drawn in an order that needs no history."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.chat.messages import SaidTurn
from asyncrl.config import Run
from asyncrl.config.sft import Sft
from asyncrl.data import rows as reading
from asyncrl.data.order import Order, kept_out
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.supervised.conversations import Conversations, Row, columns
from asyncrl.supervised.layout import Example, laid_out, longest
from asyncrl.types import Slot, Ticket, Trajectory

FIELD = "sft.path"
EXAMPLE = '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}'
"""A line as it should be, for who wrote another."""


CHUNK = 256
"""Rows that are tokenized at a time."""


class Found(NamedTuple):
    place: str
    """For errors."""
    uid: str
    row: Row


class Examples:
    """All examples of a run. Nothing changes after the start, so that any thread may read."""

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        self._run, settings = run, run.sft
        self._rows = self._too_long = 0
        examples = list(self._read(Conversations(settings, tokenizer, run.rollout)))
        if not examples:
            raise ConfigError(self._nothing_left())
        kept = kept_out([example.key for example in examples], settings.held_out)
        self._train = [example for example in examples if example.key not in kept]
        self._held_out = [example for example in examples if example.key in kept]
        self._order = Order(len(self._train), run.seed, "train", shuffled=settings.shuffle)
        self._check_epochs()

    def __len__(self) -> int:
        """Of one epoch."""
        return len(self._train)

    def __getitem__(self, index: int) -> Example:
        """The same example for the same seed and index, whatever was drawn before; the epochs follow one another."""
        return self._train[self._order[index]]

    def read(self, ticket: Ticket) -> list[Trajectory]:
        """What belongs into the buffer for a group: groups are numbered in the order of the examples."""
        example, now = self[ticket.group], time.time()
        return [example.trajectory(Slot(ticket.group, sample), ticket.version, now) for sample in ticket.samples]

    def held_out(self) -> list[Trajectory]:
        """For the held-out loss: always the same."""
        chosen = self._held_out[: self._run.evaluation.prompts]
        return [example.trajectory(Slot(number, 0), 0, 0.0) for number, example in enumerate(chosen)]

    def told(self) -> list[str]:
        """What a run says about its examples before it begins."""
        settings, run = self._run.sft, self._run
        per_step, trained = run.flow.groups_per_step, sum(example.trained_tokens for example in self._train)
        said = [
            f"{settings.path}: {len(self):,} examples to train on, {trained:,} tokens of them the model's own, and "
            f"{len(self._held_out):,} held out; steps={run.steps} of {per_step} examples are "
            f"{run.steps * per_step / len(self):.3g} epochs"
        ]
        if self._too_long:
            way = (
                "are left out (sft.too_long=cut trains on their first tokens)"
                if settings.too_long == "skip"
                else "are cut"
            )
            said.append(f"{self._too_long:,} examples of more than sft.max_length={settings.max_length} tokens {way}")
        if trees := sum(bool(example.branches) for example in self._train):
            said.append(
                f"{trees:,} examples are trained turn by turn: the chat template shows earlier turns in another way "
                "than it has them when they are said"
            )
        return said

    def _read(self, conversations: Conversations) -> Iterator[Example]:
        """Several at a time: tokenizing lets other threads go on."""
        settings, rows = self._run.sft, _rows(self._run.sft)
        with ThreadPoolExecutor() as pool:
            while chunk := list(islice(rows, CHUNK)):
                self._rows += len(chunk)
                for found, turns in zip(chunk, pool.map(partial(_turns, conversations), chunk), strict=True):
                    if longest(turns) > settings.max_length:
                        self._too_long += 1
                        if settings.too_long == "skip":
                            continue
                    if (example := laid_out(found.uid, turns, settings.max_length)) is not None:
                        yield example

    def _nothing_left(self) -> str:
        settings = self._run.sft
        if not self._rows:
            return f"{FIELD}={settings.path} holds no example; write one JSON object such as {EXAMPLE} per line"
        return (
            f"{FIELD}={settings.path}: nothing is left of its {self._rows} examples, of which {self._too_long} have "
            f"more than sft.max_length={settings.max_length} tokens; raise sft.max_length, or set sft.too_long=cut"
        )

    def _check_epochs(self) -> None:
        run, per_step = self._run, self._run.flow.groups_per_step
        most = run.sft.epochs * len(self)
        if most and run.steps * per_step > most:
            steps = most // per_step
            raise ConfigError(
                f"steps={run.steps} of flow.groups_per_step={per_step} examples are "
                f"{math.ceil(run.steps * per_step / len(self))} epochs of {len(self)} examples, and sft.epochs="
                f"{run.sft.epochs}; set "
                + (f"steps={steps}" if steps else f"flow.groups_per_step={len(self)} or less, and steps with it")
            )


def load_examples(run: Run, model_path: Path) -> Examples:
    """For the model that the run trains."""
    return Examples(run, load_tokenizer(model_path))


def _turns(conversations: Conversations, found: Found) -> list[SaidTurn]:
    try:
        return conversations.turns(found.row, found.uid)
    except ValueError as error:
        raise ConfigError(f"{found.place}: {error}") from None


def _rows(settings: Sft) -> Iterator[Found]:
    path = Path(settings.path).expanduser()
    if (path.is_file() and path.suffix != ".parquet") or path.suffix in (".jsonl", ".json"):
        for line in reading.read_lines(path, FIELD):
            row = line.read(lambda data, _: msgspec.json.decode(data, type=dict[str, Any]), EXAMPLE)
            yield Found(line.place, line.uid, row)
        return
    for number, row in enumerate(_columnar(settings, path), start=1):
        name = path.name if path.exists() else settings.path
        yield Found(f"{settings.path}, row {number}", f"{name}:{number}", _without_nulls(row))


def _columnar(settings: Sft, path: Path) -> Iterator[Row]:
    wanted = partial(columns, settings)
    if path.suffix == ".parquet" or (path.is_dir() and not reading.is_saved_dataset(path)):
        for file in reading.parquet_files(path, FIELD):
            yield from reading.read_parquet(file, FIELD, wanted)
    else:
        yield from reading.read_dataset(settings.path, settings.config, settings.split, FIELD, wanted)


def _without_nulls(value: Any) -> Any:
    """Where all rows have the same columns, what one of them lacks is null in it, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
