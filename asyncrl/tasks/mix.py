"""Prompts of several sources, in the shares of their weights."""

from collections.abc import Mapping
from itertools import permutations

import msgspec

from asyncrl.config.task import MixTask
from asyncrl.curriculum.interleaving import Interleaving
from asyncrl.errors import ConfigError
from asyncrl.system.random_streams import random_stream
from asyncrl.tasks.base import Counted, Split, Task
from asyncrl.tasks.registry import make_task
from asyncrl.types import Prompt

SEED_BITS = 31
"""Some generators take no larger seed."""


class Mix:
    """Which source a prompt is from depends on its index and the weights alone, so both splits have the same shares."""

    def __init__(self, settings: MixTask, seed: int) -> None:
        self.sources: Mapping[str, Task] = {
            # Two sources of one kind with the same seed would draw alike.
            name: make_task(settings.sources[name].task, random_stream(seed, name) % (1 << SEED_BITS))
            for name in settings.weights
        }
        self._names = list(self.sources)
        self._interleaving = Interleaving(list(settings.weights.values()))
        _check_apart(self.sources)

    def prompt(self, split: Split, index: int) -> Prompt:
        number, position = self._interleaving.locate(index)
        name = self._names[number]
        prompt = self.sources[name].prompt(split, position)
        return msgspec.structs.replace(prompt, uid=f"{name}/{prompt.uid}", source=name)


def _check_apart(sources: Mapping[str, Task]) -> None:
    """Refuse a text that one table keeps for evaluation and another one trains on. Texts of endless sources are held
    out by themselves, wherever they come from."""
    tables = {name: task for name, task in sources.items() if isinstance(task, Counted)}
    texts = {(name, split): _texts(task, split) for name, task in tables.items() for split in ("train", "held_out")}
    for kept, trained in permutations(tables, 2):
        if both := texts[kept, "held_out"] & texts[trained, "train"]:
            raise ConfigError(
                f"task.sources.{kept} keeps {len(both)} texts for evaluation that task.sources.{trained} trains on, "
                f"such as {min(both)!r:.100}: take them out of one of the two"
            )


def _texts(task: Counted, split: Split) -> set[str]:
    return {task.prompt(split, index).text for index in range(task.count(split))}
