"""What the engine tests share: making requests, collecting answers and publishing weights."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import FakeEngine as FakeSettings
from asyncrl.config import NativeEngine as NativeSettings
from asyncrl.engines.base import Engine
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.native.engine import NativeEngine
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.types import Delta, Finish, Floats, Ints, Request, Sampling, Segment, WeightManifest
from asyncrl.weights.shared_memory import SharedMemoryWriter

MakeEngine = Callable[..., Engine]
PROMPT = (5, 17, 3, 40, 22, 9, 31)


class Answer:
    """All deltas of one request."""

    def __init__(self, deltas: list[Delta]) -> None:
        assert all(delta.finish is None for delta in deltas[:-1]), "finish comes once, at the end"
        assert deltas[-1].finish is not None
        self.finish: Finish = deltas[-1].finish
        self.segments: list[Segment] = [delta.segment for delta in deltas]

    @property
    def tokens(self) -> Ints:
        return np.concatenate([segment.tokens for segment in self.segments])

    @property
    def logprobs(self) -> Floats:
        return np.concatenate([segment.logprobs for segment in self.segments])

    @property
    def versions(self) -> list[int]:
        return [segment.version for segment in self.segments]


def ask(name: str, tokens: tuple[int, ...] = PROMPT, *, seed: int = 0, resumed: int = 0, **sampling: Any) -> Request:
    return Request(
        id=name, tokens=tokens, seed=seed, resumed=resumed, sampling=Sampling(**{"max_tokens": 12} | sampling)
    )


async def collect(engine: Engine, request: Request) -> Answer:
    return Answer([delta async for delta in engine.submit(request)])


async def collect_all(engine: Engine, requests: list[Request]) -> list[Answer]:
    return list(await asyncio.gather(*(collect(engine, request) for request in requests)))


async def until_generated(engine: Engine, tokens: int) -> None:
    async with asyncio.timeout(30):
        while engine.stats().generated_tokens < tokens:  # noqa: ASYNC110  (the engine runs in this very loop)
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def native(path: Path, **settings: Any) -> NativeEngine:
    return NativeEngine(path, NativeSettings(**settings), name="native")


def fake(_path: Path, *, max_batch: int = 128, **_native_only: Any) -> FakeEngine:
    # One token more than any test asks for, always: answers end by `max_tokens`, as those of the random model do.
    return FakeEngine(FakeSettings(median_tokens=10_000, sigma=0.0, max_batch=max_batch, vocabulary=48), name="fake")


@contextmanager
def publishing(path: Path) -> Iterator[Callable[[int], WeightManifest]]:
    """Publish the weights of a checkpoint under any version."""
    model, _ = load_model(path)
    writer = SharedMemoryWriter(lambda: hf_tensors(model), prefix="test")
    try:
        yield writer.publish
    finally:
        writer.close()
