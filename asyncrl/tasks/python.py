"""Prompts from Python: a function without arguments that returns something to iterate over.

What has a length is a table. What has none, such as a generator, is read only as far as it is needed; one text in
eight of it is held out. A resumed run reads it again from its beginning, so it has to give the same prompts again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from itertools import count
from typing import Any, cast

from asyncrl.config.task import PythonTask
from asyncrl.errors import ConfigError
from asyncrl.system.user_functions import calling, load_function
from asyncrl.tasks.base import HELD_OUT_SHARE, Split, Task, is_held_out
from asyncrl.tasks.tables import Rows, make_prompt
from asyncrl.types import Prompt

EXPECTED = "a function without arguments that returns a list or a generator of prompts"
_END = object()
MAX_DRAWS = 1000 * HELD_OUT_SHARE
"""For the next prompt of a split; one text in eight is held out, so a split without one among these has none."""


def python_task(settings: PythonTask, seed: int) -> Task:
    source = f"task.function={settings.function}"
    found = _read(load_function(settings.function, "task.function"), source)
    return found if isinstance(found, Stream) else Rows(found, settings.held_out, seed, source)


class Stream:
    """An iterator, and what was read of it so far."""

    def __init__(self, items: Iterable[Any], source: str) -> None:
        self._prompts = _prompts(items, source)
        self._source = source
        self._read: dict[Split, list[Prompt]] = {"train": [], "held_out": []}

    def prompt(self, split: Split, index: int) -> Prompt:
        """From the first again where the iterator has ended."""
        found = self._read[split]
        draws = 0
        while index >= len(found) and (prompt := next(self._prompts, None)) is not None:
            drawn: Split = "held_out" if is_held_out(prompt.text) else "train"
            self._read[drawn].append(prompt)
            draws = 0 if drawn == split else draws + 1
            if draws > MAX_DRAWS:
                raise ConfigError(f"{self._source}: {MAX_DRAWS} prompts in a row and none of them {split}")
        if not found:
            raise ConfigError(f"{self._source} gives no prompt for {split}; give more, or set evaluation.prompts=0")
        return found[index % len(found)]


@lru_cache(maxsize=8)
def _read(function: Callable[[], Any], source: str) -> Stream | list[Prompt]:
    """An iterator can be read once, and both plans and runs read it: they share what was read."""
    with calling("task.function", source.partition("=")[2], EXPECTED):
        items = function()
    if not isinstance(items, Iterable):
        raise ConfigError(f"{source} returns {items!r:.100}, which cannot be iterated over; return a list, say")
    if not isinstance(items, Sized):
        return Stream(cast(Iterable[Any], items), source)
    if not (prompts := list(_prompts(cast(Iterable[Any], items), source))):
        raise ConfigError(f"{source} gives no prompt")
    return prompts


def _prompts(items: Iterable[Any], source: str) -> Iterator[Prompt]:
    each = iter(items)
    for number in count():
        with calling("task.function", source.partition("=")[2], EXPECTED):
            item = next(each, _END)
        if item is _END:
            return
        try:
            yield _prompt(item, f"python:{number}")
        except ValueError as error:
            raise ConfigError(f"{source}, item {number}: {error}") from None


def _prompt(item: Any, uid: str) -> Prompt:
    """A text, a pair of text and reference, a mapping with `prompt` and `answer`, or a Prompt."""
    match item:
        case Prompt():
            return item
        case str():
            return make_prompt(item, None, uid)
        case {"prompt": prompt}:
            return make_prompt(prompt, cast(Mapping[str, Any], item).get("answer"), uid)
        case (str() | list() as prompt, answer):
            return make_prompt(prompt, answer, uid)
        case _:
            raise ValueError(
                f'{item!r:.200} is no prompt; give a text, (text, reference) or {{"prompt": ..., "answer": ...}}'
            )
