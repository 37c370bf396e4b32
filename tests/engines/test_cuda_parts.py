"""Prompts beside rows that decode, in one pass or in two, each with its graph: answers do not tell them apart."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.drafter import DrafterSettings, NgramDrafter, NoDrafter
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cuda import decoding
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.graphs import GraphPool
from asyncrl.engines.native.cuda.inputs import Shape
from asyncrl.engines.native.cuda.timeline import Timeline
from tests.support.driving import LONG, Answer, ask, collect, serving
from tests.support.tiny_model import tiny_checkpoint

NEVER = 10**9
CLOSE = 1e-4


class Watched(CudaEngine):
    """Remembers what its steps were made of."""

    def __init__(self, path: Path, drafter: DrafterSettings) -> None:
        settings = Settings(max_batch=8, max_length=256, prefill_chunk=32)
        super().__init__(path, settings, drafter, name="watched", device=torch.device("cpu"))
        self.parts: list[Sequence[Shape]] = []

    def _open(self) -> None:
        super()._open()
        decoding, found = self._decoding, self.parts
        choose = decoding._parts

        def watched(shape: Shape) -> Sequence[Shape]:
            found.append(choose(shape))
            return found[-1]

        decoding._parts = watched


async def answers(engine: Watched) -> list[Answer]:
    """Prompts of several lengths, and two that are equal; later ones come in while the first decode."""
    prompts = [LONG[:5], LONG[:70], LONG[3:120], LONG[:70], LONG[40:41], LONG[9:60]]
    asked = [ask(f"{n}", prompt, seed=n, max_tokens=20) for n, prompt in enumerate(prompts)]
    async with serving(engine):
        return await asyncio.gather(*(collect(engine, request) for request in asked))


@pytest.mark.parametrize("drafter", [NoDrafter(), NgramDrafter(tokens=2)], ids=["plain", "ngram"])
def test_prompts_and_rows_may_be_run_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: DrafterSettings
) -> None:
    tiny_checkpoint(tmp_path)
    found: dict[int, list[Answer]] = {}
    for after, widths in ((0, {1}), (NEVER, {1, 2})):
        monkeypatch.setattr(decoding, "_JOINED_AFTER", after)
        engine = Watched(tmp_path, drafter)
        found[after] = asyncio.run(answers(engine))
        mixed = [parts for parts in engine.parts if any(part.tiles for part in parts)]
        assert mixed
        assert {len(parts) for parts in engine.parts} == widths
        assert all(len(parts) == max(widths) for parts in mixed)
        if after:
            assert all(not first.rows and not second.tiles for first, second in mixed)
    for joined, apart in zip(found[0], found[NEVER], strict=True):
        assert joined.tokens.tolist() == apart.tokens.tolist()
        np.testing.assert_allclose(joined.logprobs, apart.logprobs, atol=CLOSE)


def test_a_combination_is_worth_a_graph_when_it_has_come_often_enough() -> None:
    pool = GraphPool(Timeline(torch.device("cpu")), bound_bytes=1)
    assert [pool.worthwhile("rare", after=2) for _ in range(4)] == [False, False, True, True]
    assert not pool.worthwhile("other", after=2)
    pool.bytes = 1
    assert not pool.worthwhile("rare", after=2)


def test_at_most_a_third_of_the_tiles_is_padding() -> None:
    assert decoding.tile_counts(195) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 195]
    assert (decoding.tile_counts(1), decoding.tile_counts(2), decoding.tile_counts(24)[-2:]) == ([1], [1, 2], [16, 24])
