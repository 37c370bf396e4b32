"""Versions that are published as LoRA adapters alone: every engine computes what the merged weights give."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config.trainer import Lora
from asyncrl.engines.base import Engine, OnUpdate
from asyncrl.errors import WeightSyncError
from asyncrl.types import WeightManifest
from tests.support import needs
from tests.support.adapters import LORA, Adapted, publishing_adapters
from tests.support.driving import (
    PROMPT,
    Answer,
    Driver,
    MakeEngine,
    ask,
    collect,
    collect_all,
    cuda,
    native,
    paged,
    serving,
    until_generated,
)
from tests.support.parity import behaviour
from tests.support.real_vllm import SharedVllm, needs_vllm
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.timeout(300)
EXACT = 1e-3
"""Largest difference of fp32 log-probabilities."""
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU)]
NATIVE = ["native", "paged", pytest.param("cuda", marks=ON_GPU)]
VLLM = pytest.param("vllm", marks=needs_vllm)


class Scene:
    def __init__(self, folder: Path, family: str = "qwen3", **settings: Any) -> None:
        self.path = folder / "base"
        base = tiny_checkpoint(self.path, family, tie_word_embeddings=True, **settings)
        tiny_checkpoint(folder / "wider", tie_word_embeddings=True, hidden_size=64)
        self.wider = folder / "wider"
        trainer = Adapted(self.path)
        self.models: dict[int, PreTrainedModel] = {0: base}
        self.models |= {version: trainer.saved(version, folder / str(version)) for version in (1, 2)}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def shared_vllm(scene: Scene) -> Iterator[SharedVllm]:
    driver = SharedVllm(scene.path, adapted=LORA.targets)
    yield driver
    driver.close()


def _driver(request: pytest.FixtureRequest, scene: Scene) -> Driver:
    if request.param == "vllm":
        return request.getfixturevalue("shared_vllm")
    return Driver(_makers()[request.param], scene.path)


def _makers() -> dict[str, MakeEngine]:
    return {
        "native": native,
        "paged": partial(paged, adapted=LORA.targets),
        "cuda": partial(cuda, adapted=LORA.targets),
    }


@pytest.fixture(params=[*NATIVE, VLLM])
def drive(request: pytest.FixtureRequest, scene: Scene) -> Driver:
    return _driver(request, scene)


@pytest.fixture(params=[*NATIVE, pytest.param("vllm", marks=(*VLLM.marks, pytest.mark.slow))])
def starting(request: pytest.FixtureRequest, scene: Scene) -> Driver:
    """For tests that start an engine of their own, which takes vLLM half a minute."""
    return _driver(request, scene)


@pytest.fixture(params=[*NATIVE[1:], VLLM])
def keeping_base(request: pytest.FixtureRequest, scene: Scene) -> Driver:
    """Engines that know from the start which projections have adapters."""
    return _driver(request, scene)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_updates_in_the_middle_of_completions(drive: Driver, scene: Scene, on_update: OnUpdate) -> None:
    """Each version is made of the base, not of the version before."""
    requests = [ask(str(i), seed=i, max_tokens=120) for i in range(3)]
    likes = [1, 2, 1, 0]

    async def run() -> tuple[int, list[Answer]]:
        async with drive.engine(prefill_chunk=16) as engine:
            with publishing_adapters(scene.path) as publish:
                await engine.load_weights(publish(engine.stats().version + 1, like=0), "keep")
                began = engine.stats()
                running = asyncio.create_task(collect_all(engine, requests))
                for step, like in enumerate(likes, start=1):
                    await until_generated(engine, 60 * step, since=began.generated_tokens)
                    manifest = publish(began.version + step, like=like)
                    assert manifest.total_bytes == publish.trainer.bytes
                    ack = await engine.load_weights(manifest, on_update)
                    assert (ack.version, ack.digest) == (began.version + step, manifest.digest)
                return began.version, await running

    first, answers = drive.run(run())
    models = {first + step: scene.models[like] for step, like in enumerate([0, *likes])}
    for answer in answers:
        assert answer.versions == list(models)
        np.testing.assert_allclose(answer.logprobs, behaviour(models, PROMPT, answer, on_update), atol=EXACT)


def test_a_restarted_engine_takes_the_version_of_the_day(starting: Driver, scene: Scene) -> None:
    """From the base at once to where the others are, by way of a file, as replicas do that join late."""

    async def run() -> Answer:
        engine = starting.own()
        await engine.start()
        try:
            with publishing_adapters(scene.path, transport="file") as publish:
                await engine.load_weights(publish(2), "keep")
            return await collect(engine, ask("a", max_tokens=40))
        finally:
            await engine.close()

    answer = starting.run(run())
    assert answer.versions == [2]
    np.testing.assert_allclose(answer.logprobs, behaviour(scene.models, PROMPT, answer, "keep"), atol=EXACT)


async def unmoved(engine: Engine, version: int, manifest: WeightManifest, said: str) -> None:
    """A refusal: the version before is served as it was."""
    before = await collect(engine, ask("before", max_tokens=30))
    with pytest.raises(WeightSyncError, match=said):
        await engine.load_weights(manifest, "keep")
    after = await collect(engine, ask("after", max_tokens=30))
    assert before.versions == after.versions == [version]
    assert after.tokens.tolist() == before.tokens.tolist()
    np.testing.assert_allclose(after.logprobs, before.logprobs, atol=EXACT)


def spoil(file: Path) -> None:
    file.write_bytes(b"\1" + file.read_bytes()[1:])


def test_a_wrong_digest_leaves_the_version_before(drive: Driver, scene: Scene) -> None:
    async def run() -> None:
        async with drive.engine() as engine:
            version = engine.stats().version + 1
            with publishing_adapters(scene.path) as publish:
                await engine.load_weights(publish(version, like=1), "keep")
                spoiled = publish(version + 1, like=2)
                spoil(Path(spoiled.location))
                await unmoved(engine, version, spoiled, f"version {version} is kept")

    drive.run(run())


def test_adapters_of_another_model_are_refused(drive: Driver, scene: Scene) -> None:
    async def run() -> None:
        async with drive.engine() as engine:
            version = engine.stats().version
            with publishing_adapters(scene.wider) as publish:
                await unmoved(engine, version, publish(version + 1), "belong to other matrices")

    drive.run(run())


@pytest.mark.parametrize("targets", [(*LORA.targets, "o_proj"), LORA.targets[1:]], ids=["more", "fewer"])
def test_an_engine_that_keeps_a_base_takes_adapters_of_just_that(
    keeping_base: Driver, scene: Scene, targets: Any
) -> None:
    async def run() -> None:
        async with keeping_base.engine() as engine:
            version = engine.stats().version
            with publishing_adapters(scene.path, Lora(rank=4, targets=targets)) as publish:
                await unmoved(engine, version, publish(version + 1), "belong to other matrices")

    keeping_base.run(run())


@pytest.mark.parametrize("make", [native, partial(paged, adapted=LORA.targets)], ids=["native", "paged"])
@pytest.mark.parametrize("transport", ["shared_memory", "file", "file+delta"])
def test_every_transport_carries_them(make: MakeEngine, scene: Scene, transport: str) -> None:
    name, _, delta = transport.partition("+")

    async def run() -> None:
        async with serving(make(scene.path)) as engine:
            how: Any = {"transport": name, "delta": bool(delta)}
            with publishing_adapters(scene.path, **how) as publish:
                for version in (1, 2):
                    await engine.load_weights(publish(version), "keep")
                    answer = await collect(engine, ask("a", max_tokens=20))
                    expected = behaviour(scene.models, PROMPT, answer, "keep")
                    np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)

    asyncio.run(run())


@pytest.mark.parametrize("kind", [*NATIVE])
@pytest.mark.parametrize("dense", [[], [0]], ids=["experts", "mixed"])
def test_every_expert_has_its_own(kind: str, dense: list[int], tmp_path: Path) -> None:
    """Layers that have experts may all be alike, or have a dense one among them."""
    scene = Scene(tmp_path, "qwen3_moe", mlp_only_layers=dense)

    async def run() -> None:
        async with serving(_makers()[kind](scene.path)) as engine:
            with publishing_adapters(scene.path) as publish:
                for version in (1, 2):
                    await engine.load_weights(publish(version), "keep")
                    answer = await collect(engine, ask("a", max_tokens=20))
                    expected = behaviour(scene.models, PROMPT, answer, "keep")
                    np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)

    asyncio.run(run())
