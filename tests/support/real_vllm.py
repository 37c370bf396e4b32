"""Driving real vLLM: it takes half a minute to start, so tests share one, in one event loop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.drafter import NoDrafter
from asyncrl.config.engine import VllmEngine
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm.build import build_vllm
from asyncrl.system import minimum_versions
from tests.support import needs
from tests.support.driving import Driver, T

TINY = VllmEngine(max_batch=64, max_length=512, eager=True, memory=0.05, gpu_cache_gib=1)
needs_vllm = pytest.mark.skipif(
    minimum_versions.vllm_problem(minimum_versions.vllm_installed()) is not None, reason=needs.VLLM
)


def vllm(path: Path, *, adapted: Sequence[str] = (), precision: str = "fp32", **_others: Any) -> Engine:
    return build_vllm(path, TINY, NoDrafter(), name="vllm", adapted=adapted, precision=precision)


class SharedVllm(Driver):
    """Batch sizes and chunks that a test asks for are left to vLLM: it has one setting for all of them."""

    def __init__(self, path: Path, *, adapted: Sequence[str] = (), precision: str = "fp32") -> None:
        super().__init__(partial(vllm, adapted=adapted, precision=precision), path)
        self._runner = asyncio.Runner()
        self._shared: Engine | None = None
        self.run = self._run
        self.batch_sizes = (TINY.max_batch,)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    @asynccontextmanager
    async def engine(self, **settings: Any) -> AsyncIterator[Engine]:
        if self._shared is None:
            self._shared = self.own()
            await self._shared.start()
        yield self._shared
        stats = self._shared.stats()
        assert stats.running == stats.waiting == 0, "a test leaves requests behind"

    def close(self) -> None:
        if self._shared is not None:
            self._run(self._shared.close())
        self._runner.close()
