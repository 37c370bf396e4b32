"""Copies of partly filled pages: those of a step are made in one go, each into a page of its own."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.engines.cooperative import Job
from asyncrl.engines.native.batch_table import BatchTable
from asyncrl.engines.native.cuda.inputs import Sizes, StepInputs
from asyncrl.engines.native.cuda.memory import KvMemory
from asyncrl.engines.native.cuda.pages import PAGE, Copy, PageTable
from asyncrl.engines.native.cuda.planner import Planner
from asyncrl.engines.native.cuda.timeline import Timeline
from tests.support.driving import LONG, ask

LAYERS, HEADS, DIM, PAGES = 2, 3, 4, 50


class _Model:
    """As much of one as its memory asks for: pages of random bytes."""

    blocks = (None,) * LAYERS

    def new_pages(self, pages: int, page: int, layers: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or torch.bfloat16
        shape = layers, 2, pages, HEADS, page, DIM * dtype.itemsize
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("at_once", [1, 10**5, 10**9])
def test_pages_are_copied_bit_by_bit_and_no_other_one_changes(
    monkeypatch: pytest.MonkeyPatch, fp8: bool, at_once: int
) -> None:
    monkeypatch.setattr("asyncrl.engines.native.cuda.memory.COPIED_BYTES", at_once)
    model: Any = _Model()
    memory = KvMemory(model, PAGES, fp8=fp8, head=True)
    copies = [Copy(source=i % 7, target=PAGES - 1 - i) for i in range(20)]  # siblings have one source
    held = [*(kv.pages_2_X_K_S_D for kv in memory.layers), memory.head.pages_2_X_K_S_D]
    expected = [_bytes(pages).clone() for pages in held]
    for pages in expected:
        for copy in copies:
            pages[:, copy.target] = pages[:, copy.source]
    memory.copy(copies)
    assert all(torch.equal(_bytes(pages), wanted) for pages, wanted in zip(held, expected, strict=True))


def _bytes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8)


def test_the_siblings_of_a_step_share_one_call() -> None:
    """70 tokens are a full page, which is shared, and six more: three siblings copy those."""
    waiting = deque(Job(ask(f"{i}", (LONG * 9)[:71], seed=i)) for i in range(4))
    calls, slots, pages = list[list[Copy]](), BatchTable(4, 4 * PAGE), PageTable(4, 4 * PAGE, 16)
    planner = Planner(slots, pages, waiting, calls.append, tiles=8, tile=16)
    fields = StepInputs(Sizes(4, 1, 4, 8, 16), Timeline(torch.device("cpu"))).next()
    planner.admit()
    assert planner.prefill(fields) == 5
    assert not calls
    assert planner.prefill(fields) == 0
    first, second = pages.table[0, :2].tolist()
    assert pages.table[1:, 0].tolist() == [first] * 3
    assert calls == [[Copy(second, page) for page in pages.table[1:, 1].tolist()]]
    assert len(set(pages.table[:, 1].tolist())) == 4
    planner.prefill(fields)
    assert len(calls) == 1
