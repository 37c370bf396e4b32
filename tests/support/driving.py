"""What the engine tests share: making requests, collecting answers and publishing weights."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from asyncrl.config.engine import FakeEngine as FakeSettings
from asyncrl.config.engine import NativeEngine as NativeSettings
from asyncrl.config.engine import TransformersEngine as TransformersSettings
from asyncrl.engines.base import Engine
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.transformers.engine import TransformersEngine
from asyncrl.models.checkpoint import load_model, read_weights
from asyncrl.models.names import hf_tensors
from asyncrl.types import Delta, Finish, Floats, Ints, Request, Sampling, Segment, WeightManifest
from asyncrl.weights.gather import Tensors
from asyncrl.weights.transports.shared_memory import SharedMemoryWriter

T = TypeVar("T")
MakeEngine = Callable[..., Engine]
PROMPT = (5, 17, 3, 40, 22, 9, 31)
LONG = tuple(int(token) for token in np.random.default_rng(1).integers(0, 48, 150))


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


async def until_generated(engine: Engine, tokens: int, *, since: int = 0) -> None:
    async with asyncio.timeout(60):
        while engine.stats().generated_tokens < since + tokens:  # noqa: ASYNC110  (it is counted in this very loop)
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


def paged(path: Path, *, adapted: Sequence[str] = (), **settings: Any) -> CudaEngine:
    """The engine for GPUs with its kernels in torch, on a CPU."""
    return CudaEngine(path, NativeSettings(**settings), name="paged", device=torch.device("cpu"), adapted=adapted)


def cuda(path: Path, *, adapted: Sequence[str] = (), **settings: Any) -> CudaEngine:
    return CudaEngine(path, NativeSettings(**{"graph_memory_gib": 0.25} | settings), name="cuda", adapted=adapted)


def transformers(path: Path, **settings: Any) -> TransformersEngine:
    return TransformersEngine(path, TransformersSettings(**settings), name="transformers")


def fake(_path: Path, *, max_batch: int = 128, **_native_only: Any) -> FakeEngine:
    # One token more than any test asks for, always: answers end by `max_tokens`, as those of the random model do.
    return FakeEngine(FakeSettings(median_tokens=10_000, sigma=0.0, max_batch=max_batch, vocabulary=48), name="fake")


class Driver:
    """Runs tests against fresh engines of one kind."""

    def __init__(self, make: MakeEngine, path: Path, *, redrafts: bool = False) -> None:
        self._make = make
        self._path = path
        self.redrafts = redrafts
        """Whether sampled tokens, though not their distribution, depend on where drafting has begun anew."""
        self.run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
        self.batch_sizes = (1, 5, 64)
        """That an engine can be given."""

    def engine(self, **settings: Any) -> AbstractAsyncContextManager[Engine]:
        """A serving engine; it may have served others before, so counters and versions are compared, not known."""
        return serving(self.own(**settings))

    def own(self, **settings: Any) -> Engine:
        """An engine that nobody else uses, not yet started."""
        return self._make(self._path, **settings)


@contextmanager
def publishing(path: Path) -> Iterator[Callable[[int], WeightManifest]]:
    """Publish the weights of a checkpoint, which our decoder can load, under any version."""
    model, _ = load_model(path)
    with _publishing(lambda: hf_tensors(model)) as publish:
        yield publish


@contextmanager
def publishing_files(path: Path) -> Iterator[Callable[[int], WeightManifest]]:
    """The same of any family: tensors as they are in the files."""
    with _publishing(lambda: read_weights(path)) as publish:
        yield publish


@contextmanager
def _publishing(tensors: Tensors) -> Iterator[Callable[[int], WeightManifest]]:
    writer = SharedMemoryWriter(tensors, prefix="test")
    try:
        yield writer.publish
    finally:
        writer.close()


def child_processes() -> set[int]:
    """Processes that descend from this one, but for the helpers that Python itself keeps."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and b"resource_tracker" not in (process / "cmdline").read_bytes():
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family - {os.getpid()}
