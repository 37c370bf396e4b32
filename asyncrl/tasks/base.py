"""Where prompts come from."""

from typing import Literal, Protocol
from zlib import crc32

from asyncrl.tasks.settings import (
    ChainsTask,
    CodeTask,
    DatasetTask,
    JsonlTask,
    ParquetTask,
    PythonTask,
    ReasoningGymTask,
    TaskSettings,
)
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


def make_task(settings: TaskSettings, seed: int) -> Task:
    # Imported here because each task imports Split from this module.
    from asyncrl.tasks.chains import Chains
    from asyncrl.tasks.code import Code
    from asyncrl.tasks.dataset import Dataset
    from asyncrl.tasks.jsonl import Jsonl
    from asyncrl.tasks.parquet import Parquet
    from asyncrl.tasks.python import python_task

    match settings:
        case ChainsTask():
            return Chains(settings, seed)
        case JsonlTask():
            return Jsonl(settings, seed)
        case ParquetTask():
            return Parquet(settings, seed)
        case DatasetTask():
            return Dataset(settings, seed)
        case PythonTask():
            return python_task(settings, seed)
        case CodeTask():
            return Code(settings, seed)
        case ReasoningGymTask():
            from asyncrl.tasks.reasoning_gym import ReasoningGym  # an optional package

            return ReasoningGym(settings, seed)


def is_held_out(text: str) -> bool:
    return crc32(text.encode()) % HELD_OUT_SHARE == 0
