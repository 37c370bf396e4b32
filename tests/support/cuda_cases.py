"""Rows and pages that attention is checked on."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.engines.native.cuda.kernels.shapes import Heads, Queries
from tests.support.cuda_places import Place


class Case(NamedTuple):
    heads: Heads
    page: int
    width: int
    starts: list[int]
    counts: list[int]
    dtype: torch.dtype = torch.float32
    norm: bool = True

    def queries(self, place: Place) -> Queries:
        """Rows in reverse order, each with pages of its own in no order."""
        groups = len(self.starts)
        pages = max(start + self.width for start in self.starts) // self.page + 1
        table_N_P = torch.randperm(groups * pages, generator=torch.Generator().manual_seed(0)).view(groups, pages)
        rows = place.integers(list(range(groups))[::-1])
        table_N_P = table_N_P.to(place.device, torch.int32)
        return Queries(self.width, rows, place.integers(self.starts), place.integers(self.counts), table_N_P)

    def kv(self, place: Place, queries: Queries) -> Tensor:
        shape = 2, queries.table_N_P.numel(), self.heads.keys, self.page, self.heads.dim
        return place.normal(*shape, dtype=self.dtype)

    def qkv(self, place: Place) -> Tensor:
        return place.normal(len(self.starts) * self.width, self.heads.all * self.heads.dim, dtype=self.dtype)


def cases(place: Place) -> list[Case]:
    if not place.large:
        return [
            Case(Heads(4, 2, 32), 16, 1, [0, 5, 33], [1, 1, 1]),
            Case(Heads(4, 2, 24), 16, 3, [0, 14, 30], [3, 0, 2], norm=False),
            Case(Heads(2, 1, 16), 16, 20, [0, 13], [20, 7], torch.float16),
        ]
    heads = Heads(32, 8, 128)
    return [
        Case(heads, 64, 1, [700], [1], torch.bfloat16),
        Case(heads, 64, 1, [0, 1, 63, 64, 65, 511, 2000, 9], [1, 1, 1, 1, 1, 1, 1, 0], torch.bfloat16),
        Case(heads, 64, 1, list(range(0, 1280, 10)), [1] * 128, torch.bfloat16),
        Case(heads, 64, 5, [0, 60, 1000], [5, 5, 3], torch.bfloat16),
        Case(heads, 64, 16, [0, 16, 32, 600], [16, 16, 9, 16], torch.bfloat16),
        Case(Heads(4, 2, 32), 64, 1, [0, 300], [1, 1]),
        Case(Heads(4, 2, 32), 64, 32, [0, 300], [32, 1], norm=False),
        Case(Heads(16, 2, 64), 64, 16, [0, 300], [16, 2], torch.bfloat16),
    ]
