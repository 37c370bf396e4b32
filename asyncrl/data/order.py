"""The order in which the rows of a table are drawn, epoch after epoch: a position needs no history."""

import math
from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from random import Random


class Order:
    """Every row once in each epoch; a pure function of the seed, the name and the index."""

    def __init__(self, rows: int, seed: int, name: str, *, shuffled: bool = True) -> None:
        self._rows, self._seed, self._name, self._shuffled = rows, seed, name, shuffled
        self._of_epoch = lru_cache(maxsize=4)(self._shuffle)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self._rows)
        return self._of_epoch(epoch)[position] if self._shuffled else position

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(self._rows))
        Random(f"{self._seed}/{self._name}/{epoch}").shuffle(order)
        return order


def kept_out(rows: Collection[bytes], share: float) -> set[bytes]:
    """The share that is held out: the same rows whatever the seed and the order of the file. If it is not all of them,
    one at least is left to train on."""
    if share == 1:
        return set(rows)
    ranked = sorted(set(rows), key=lambda row: blake2b(row).digest())
    return set(ranked[: min(math.ceil(share * len(ranked)), len(ranked) - 1)])
