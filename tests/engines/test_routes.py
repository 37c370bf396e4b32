"""Routes that the native engine returns: those of every token that it fed, under the weights that it was fed with."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.config.drafter import DrafterSettings, NgramDrafter, NoDrafter
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.base import OnUpdate
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.models.checkpoint import load_model
from asyncrl.models.routes import Routes, RouteShape
from asyncrl.types import Request
from tests.engines.test_conformance import NATIVE
from tests.support.driving import LONG, PROMPT, Answer, ask, collect, collect_all, publishing, serving, until_generated
from tests.support.routes import routes_of, shape_of
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    tiny_checkpoint(directory, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    return directory


class Make(NamedTuple):
    """Engines of one kind."""

    kind: str

    def __call__(
        self, path: Path, drafter: DrafterSettings | None = None, *, routes: bool = True, pages: int | None = None
    ) -> NativeEngine | CudaEngine:
        """Three rows, so that some wait and rows move; prompts in several chunks."""
        settings = Settings(max_batch=3, prefill_chunk=16, max_length=256)
        if self.kind == "native":
            return NativeEngine(path, settings, drafter, name="native", routes=routes)
        device = torch.device("cpu" if self.kind == "paged" else self.kind)
        return CudaEngine(path, settings, drafter, name=self.kind, device=device, routes=routes, pages=pages)


@pytest.fixture(params=NATIVE)
def engine(request: pytest.FixtureRequest) -> Make:
    return Make(request.param)


def returned(answer: Answer, shape: RouteShape) -> Routes:
    return shape.read(b"".join(segment.route_bytes for segment in answer.segments))


def fed(request: Request, answer: Answer) -> tuple[int, ...]:
    return (*request.tokens, *answer.tokens.tolist()[:-1])


@pytest.mark.parametrize("drafter", [NoDrafter(), NgramDrafter()], ids=["plain", "drafts"])
def test_every_fed_token_has_the_experts_that_the_model_chooses(
    engine: Make, path: Path, drafter: DrafterSettings
) -> None:
    """Prompts that are shared, long ones that are computed in chunks, drafts that are accepted or not."""
    model, _ = load_model(path)
    prompts = [PROMPT, PROMPT, PROMPT, LONG[:45], LONG[:45], 12 * (7, 8), 12 * (7, 8)]
    requests = [ask(str(i), prompt, seed=i, max_tokens=8 + i) for i, prompt in enumerate(prompts)]

    async def run() -> list[Answer]:
        async with serving(engine(path, drafter)) as serves:
            return await collect_all(serves, requests)

    assert shape_of(model) == RouteShape(layers=(0, 2), active=2, experts=8)
    for request, answer in zip(requests, asyncio.run(run()), strict=True):
        assert np.array_equal(returned(answer, shape_of(model)), routes_of(model, fed(request, answer)))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_token_has_the_route_of_the_weights_that_it_was_first_fed_with(
    engine: Make, path: Path, on_update: OnUpdate, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], seed=1)
    before, after = load_model(path)[0], load_model(tmp_path)[0]
    sampled = 200 if engine.kind == "cuda" else 40  # a card samples 40 before the weights are there
    request = ask("a", max_tokens=sampled)

    async def run() -> Answer:
        async with serving(engine(path)) as serves:
            running = asyncio.create_task(collect(serves, request))
            await until_generated(serves, 15)
            with publishing(tmp_path) as publish:
                await serves.load_weights(publish(1), on_update)
            return await running

    answer, shape = asyncio.run(run()), shape_of(before)
    assert answer.versions == [0, 1]
    routes, tokens = returned(answer, shape), fed(request, answer)
    cut = len(PROMPT) + len(answer.segments[0]) - 1
    assert (len(routes), len(answer.segments[0].route_bytes)) == (len(PROMPT) + sampled - 1, cut * shape.token_bytes)
    assert np.array_equal(routes[:cut], routes_of(before, tokens)[:cut])
    if on_update == "recompute":  # else new weights look at old keys, which no single forward does
        assert np.array_equal(routes[cut:], routes_of(after, tokens)[cut:])
        assert not np.array_equal(routes[:cut], routes_of(after, tokens)[:cut])


def test_a_completion_continued_elsewhere_gets_the_routes_that_are_missing(engine: Make, path: Path) -> None:
    whole, shape = ask("whole", LONG[:30], max_tokens=20), shape_of(load_model(path)[0])

    async def run() -> tuple[Answer, Answer, Answer]:
        async with serving(engine(path)) as one, serving(engine(path)) as other:
            undisturbed = await collect(one, whole)
            running = asyncio.create_task(collect(one, msgspec.structs.replace(whole, id="part")))
            await until_generated(one, 8, since=20)
            await one.abort("part")
            part = await running
            known = (*whole.tokens, *part.tokens.tolist())
            sampled = len(part.tokens)
            rest = msgspec.structs.replace(whole, tokens=known, resumed=sampled, routed=len(known) - 1)
            return undisturbed, part, await collect(other, rest)

    undisturbed, part, rest = asyncio.run(run())
    assert part.finish == "abort"
    assert undisturbed.tokens.tolist() == [*part.tokens.tolist(), *rest.tokens.tolist()]
    assert len(returned(rest, shape)) == len(rest.tokens)
    both = np.concatenate([returned(part, shape), returned(rest, shape)])
    assert np.array_equal(both, returned(undisturbed, shape))


def test_a_row_that_gave_up_its_pages_keeps_its_routes(path: Path) -> None:
    """Two rows of up to four pages each, and five pages: the younger one is computed again."""
    requests = [ask(str(i), LONG[: 40 + i], seed=i, max_tokens=150) for i in range(2)]
    model = load_model(path)[0]

    async def run() -> tuple[list[Answer], int]:
        async with serving(Make("paged")(path, pages=5)) as serves:
            found = await collect_all(serves, requests)
            stats = serves.stats()
            return found, stats.prefilled_tokens + stats.cached_tokens

    answers, fed_tokens = asyncio.run(run())
    assert fed_tokens > 100, "one of them began again"
    for request, answer in zip(requests, answers, strict=True):
        assert np.array_equal(returned(answer, shape_of(model)), routes_of(model, fed(request, answer)))


def test_none_are_returned_where_none_are_wanted_or_there_are_no_experts(
    engine: Make, path: Path, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, "qwen3")

    async def run(served: NativeEngine | CudaEngine) -> Answer:
        async with serving(served) as serves:
            return await collect(serves, ask("a"))

    for served in (engine(path, routes=False), engine(tmp_path)):
        assert [segment.route_bytes for segment in asyncio.run(run(served)).segments] == [b""]


def test_of_all_layers_those_with_experts_are_kept() -> None:
    shape = RouteShape(layers=(0, 2), active=2, experts=300)
    found = [np.arange(12).reshape(2, 3, 2), 290 + np.arange(6).reshape(1, 3, 2)]
    assert shape.read(shape.write(found)).tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]], [[290, 291], [294, 295]]]
