"""Prompts from a finite table: rows that somebody else wrote, epoch after epoch, each epoch in another order."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any, cast

from asyncrl.errors import ConfigError
from asyncrl.refusals import did_you_mean
from asyncrl.tasks.base import Split
from asyncrl.tasks.settings import Columns
from asyncrl.types import Prompt


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
    return [str(message["content"]) for message in messages]


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _held_out(texts: set[str], share: float) -> set[str]:
    """The same texts whatever the seed and the order of the file; one at least is left to train on."""
    ranked = sorted(texts, key=lambda text: blake2b(text.encode()).digest())
    return set(ranked[: min(math.ceil(share * len(ranked)), len(ranked) - 1)])
