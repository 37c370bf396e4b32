"""Gathers and sends take turns on every rank: an order that is seen, on ranks that are threads."""

import random
import threading
import time

import pytest
import torch

from asyncrl.types import TensorSpec
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import OneRank, fill, gathered
from asyncrl.weights.manifest import cut, layout

RANKS = 3
TENSORS = {f"t{number}": torch.arange(float(8 + 5 * number)) for number in range(9)}


class Shards:
    """One rank's view of tensors that are cut among all; says what it does, and takes its time."""

    def __init__(self, rank: int, barrier: threading.Barrier, log: list[tuple[str, int, str]], seed: int) -> None:
        self._rank, self._barrier, self._log = rank, barrier, log
        self._random = random.Random(seed + rank)

    def layout(self) -> tuple[tuple[TensorSpec, ...], int]:
        return layout(TENSORS.items())

    def gather(self, spec: TensorSpec) -> torch.Tensor | None:
        time.sleep(self._random.random() / 1000)
        self._log.append(("gathered", self._rank, spec.name))
        return TENSORS[spec.name] if self._rank == 0 else None

    def fence(self) -> None:
        self._barrier.wait(timeout=20)


def _rank(rank: int, barrier: threading.Barrier, log: list[tuple[str, int, str]], flat: Flat, seed: int) -> None:
    source = Shards(rank, barrier, log, seed)
    for offset, _ in gathered(source, flat, cut(len(flat.memory), 128)):
        if rank == 0:
            log.append(("sending", 0, str(offset)))
            time.sleep(0.001)
            log.append(("sent", 0, str(offset)))


@pytest.mark.parametrize("seed", range(5))
def test_no_rank_gathers_while_the_first_sends(seed: int) -> None:
    specs, total = layout(TENSORS.items())
    flats = [Flat.empty(specs, total) for _ in range(RANKS)]
    barrier, log = threading.Barrier(RANKS), []
    threads = [threading.Thread(target=_rank, args=(rank, barrier, log, flats[rank], seed)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for offset, size in cut(total, 128):
        sending, sent = log.index(("sending", 0, str(offset))), log.index(("sent", 0, str(offset)))
        assert sent == sending + 1, "nothing happens between the two, on any rank"
        needed = {spec.name for spec in specs if spec.offset < offset + size}
        before = {(rank, name) for what, rank, name in log[:sending] if what == "gathered"}
        assert before == {(rank, name) for rank in range(RANKS) for name in needed}
    assert {name: tensor.tolist() for name, tensor in flats[0].tensors()} == {n: t.tolist() for n, t in TENSORS.items()}
    assert not flats[1].memory.any()


def test_one_rank_gathers_everything() -> None:
    source = OneRank(lambda: TENSORS.items())
    flat = fill(source, Flat.empty(*source.layout()))
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in flat.tensors())
