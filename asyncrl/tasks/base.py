"""Where prompts come from."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable
from zlib import crc32

from asyncrl.types import Prompt

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 8
"""Of endless questions one text in this many is held out, whatever the seed."""


class Task(Protocol):
    """An endless sequence of prompts per split.

    `prompt` depends on nothing but the seed, the split and the index, so a position in the stream is one integer and
    a resumed run needs no other state. The two splits never share a text.
    """

    def prompt(self, split: Split, index: int) -> Prompt: ...


@runtime_checkable
class Bounded(Protocol):
    """A task that knows its longest prompt, so that a plan need not look for it."""

    def longest(self) -> Prompt: ...


@runtime_checkable
class Listed(Protocol):
    """A task that is a list: all its prompts can be looked at before a run."""

    def listed(self, most: int) -> Sequence[Prompt]:
        """The first of them, in the order of the source."""
        ...


@runtime_checkable
class Counted(Task, Protocol):
    """A task of so many prompts: the first `count` indices of a split are all different ones."""

    def count(self, split: Split) -> int: ...


@runtime_checkable
class Mixed(Protocol):
    """A task of several sources, in their order."""

    sources: Mapping[str, Task]


def sizes(task: Task) -> list[int | None]:
    """Training prompts of each source of a task; None where it is endless."""
    if isinstance(task, Mixed):
        return [size for each in task.sources.values() for size in sizes(each)]
    return [task.count("train") if isinstance(task, Counted) else None]


def is_held_out(text: str) -> bool:
    return crc32(text.encode()) % HELD_OUT_SHARE == 0
