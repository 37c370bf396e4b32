"""New weights in the engine for GPUs between two steps that overlap: what was launched before has the old version."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.config.drafter import NgramDrafter, Strategy
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.engines.native.cuda.device_outputs import Flight
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.sampling import Column
from asyncrl.errors import EngineError
from asyncrl.types import Delta, WeightAck, WeightManifest
from tests.support.driving import LONG, PROMPT, Answer, ask, collect, collect_all, publishing, serving, until_generated
from tests.support.parity import behaviour
from tests.support.tiny_model import tiny_checkpoint

EXACT = 1e-3
Hook = Callable[[], object]


class Watched(CudaEngine):
    """Does something when weights have been queued and the running step is not yet read; then holds its steps back."""

    def __init__(self, path: Path, drafter: NgramDrafter | None = None) -> None:
        settings = Settings(max_batch=128, max_length=512, prefill_chunk=64)
        super().__init__(path, settings, drafter, name="watched", device=torch.device("cpu"))
        self.when_due: Hook | None = None
        self.goes_on = True
        self.before: list[int] = []
        """Tokens that each running answer had when weights were queued, without that of the running step."""
        self.overlapped: list[bool] = []
        """Whether the next step had been launched when the last one before new weights was read."""

    def _step(self) -> None:
        if self._due is not None:
            assert self._flight is not None
            slots = self._slots
            self.before = (slots.known[: slots.count] - [len(job.request.tokens) for job in slots.jobs]).tolist()
            if self.when_due is not None:
                hook, self.when_due = self.when_due, None
                hook()
            if not self.goes_on:
                return
        super()._step()

    def _collect(self, flight: Flight, rows_R: Column, place_R: Column) -> None:
        if self._due is not None:
            self.overlapped.append(self._flight is not None and self._flight is not flight)
        super()._collect(flight, rows_R, place_R)


class Scene:
    def __init__(self, old: Path, new: Path, models: dict[int, PreTrainedModel]) -> None:
        self.old, self.new, self.models = old, new, models

    def exact(self, answer: Answer, prompt: tuple[int, ...] = PROMPT) -> None:
        """Each token has the log-probability of its version, on keys that stay as they were computed."""
        expected = behaviour(self.models, prompt, answer, "keep")
        np.testing.assert_allclose(answer.logprobs, expected, atol=EXACT)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    old, new = (tmp_path_factory.mktemp(name) for name in ("old", "new"))
    first, second = tiny_checkpoint(old), tiny_checkpoint(new, seed=1)
    return Scene(old, new, {0: first, 1: second, 2: first})


async def gather(deltas: AsyncIterator[Delta]) -> Answer:
    return Answer([delta async for delta in deltas])


async def load(engine: Watched, manifest: WeightManifest) -> WeightAck:
    """While there is something to read."""
    await until_generated(engine, 10)
    return await engine.load_weights(manifest, "keep")


def update(scene: Scene, engine: Watched, *, length: int = 300) -> tuple[WeightAck, Answer]:
    """One answer, and one update while it is running."""

    async def run() -> tuple[WeightAck, Answer]:
        with publishing(scene.new) as publish:
            async with serving(engine):
                running = asyncio.create_task(collect(engine, ask("a", max_tokens=length)))
                return await load(engine, publish(1)), await running

    return asyncio.run(run())


def test_the_running_step_has_the_old_version_and_the_next_is_launched_before_it_is_read(scene: Scene) -> None:
    engine = Watched(scene.old)
    ack, answer = update(scene, engine)
    assert ack.version == engine.stats().version == 1
    assert engine.overlapped == [True]
    assert answer.versions == [0, 1]
    assert [len(answer.segments[0])] == [count + 1 for count in engine.before]
    assert len(answer.tokens) == 300
    scene.exact(answer)


def test_an_answer_that_ends_with_the_running_step_is_of_the_old_version(scene: Scene) -> None:
    engine, requests = Watched(scene.old), [ask(f"{i}", seed=i, max_tokens=20 + i) for i in range(100)]

    async def run() -> list[Answer]:
        with publishing(scene.new) as publish:
            async with serving(engine):
                running = asyncio.create_task(collect_all(engine, requests))
                await load(engine, publish(1))
                return await running

    answers = asyncio.run(run())
    assert engine.overlapped == [True]
    for answer, request in zip(answers, requests, strict=True):
        assert len(answer.tokens) == request.sampling.max_tokens
        scene.exact(answer)
    last = max(engine.before) + 1
    assert {len(answer.tokens) for answer in answers if answer.versions == [0]} == set(range(20, last + 1))
    assert all(answer.versions == [0, 1] for answer in answers if len(answer.tokens) > last)


def test_a_request_that_comes_before_the_version_counts_is_all_of_the_new_one(scene: Scene) -> None:
    """It neither has the old version nor shares the old keys of its prompt."""
    engine, late = Watched(scene.old), list[asyncio.Task[Answer]]()

    async def run() -> tuple[Answer, Answer]:
        def submit() -> None:
            late.append(asyncio.create_task(gather(engine.submit(ask("late", LONG, seed=7)))))

        engine.when_due = submit
        with publishing(scene.new) as publish:
            async with serving(engine):
                running = asyncio.create_task(collect(engine, ask("a", LONG, max_tokens=250)))
                await load(engine, publish(1))
                return await running, await late[0]

    async def fresh() -> Answer:
        async with serving(Watched(scene.new)) as engine:
            return await collect(engine, ask("late", LONG, seed=7))

    early, found = asyncio.run(run())
    scene.exact(early, LONG)
    expected = asyncio.run(fresh())
    assert found.versions == [1]
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_an_idle_engine_switches_at_once(scene: Scene) -> None:
    """Also where a step is left that nobody reads: a stop token is seen one step late."""
    engine = Watched(scene.old)

    async def run() -> Answer:
        with publishing(scene.new) as publish:
            async with serving(engine):
                free = await collect(engine, ask("free", max_tokens=30))
                await collect(engine, ask("stops", max_tokens=30, stop=(int(free.tokens[5]),)))
                assert engine._flight is not None
                await engine.load_weights(publish(1), "keep")
                assert engine._flight is None
                assert engine.stats().version == 1
                await engine.load_weights(publish(2), "keep")
                assert engine.stats().version == 2
                await engine.load_weights(publish(1), "keep")
                return await collect(engine, ask("after"))

    answer = asyncio.run(run())
    assert answer.versions == [1]
    scene.exact(answer)


def test_a_pause_lets_the_version_count(scene: Scene) -> None:
    engine = Watched(scene.old)

    async def run() -> Answer:
        async def pause() -> None:
            await engine.pause()
            assert engine._flight is None
            assert engine.stats().version == 1

        pausing = list[asyncio.Task[None]]()

        def hold() -> None:
            engine.goes_on = False
            pausing.append(asyncio.create_task(pause()))

        engine.when_due = hold
        with publishing(scene.new) as publish:
            async with serving(engine):
                running = asyncio.create_task(collect(engine, ask("a", max_tokens=300)))
                await load(engine, publish(1))
                await pausing[0]
                assert engine.stats().generated_tokens == engine.before[0] + 1
                engine.goes_on = True
                await engine.resume()
                return await running

    answer = asyncio.run(run())
    assert answer.versions == [0, 1]
    assert [len(answer.segments[0])] == [count + 1 for count in engine.before]
    scene.exact(answer)


def test_the_version_counts_when_every_answer_is_given_up_meanwhile(scene: Scene) -> None:
    engine, aborting = Watched(scene.old), list[asyncio.Task[None]]()

    def give_up() -> None:
        engine.goes_on = False
        aborting.append(asyncio.create_task(engine.abort("a")))

    engine.when_due = give_up
    ack, answer = update(scene, engine)
    assert ack.version == engine.stats().version == 1
    assert (answer.finish, answer.versions) == ("abort", [0])
    assert [len(answer.tokens)] == engine.before


@pytest.mark.parametrize("how", ["closed", "failed in step"])
def test_nobody_waits_for_the_version_of_an_engine_that_ends(scene: Scene, how: str) -> None:
    engine, closing = Watched(scene.old), list[asyncio.Task[None]]()

    def end() -> None:
        engine.goes_on = False
        if how != "closed":
            raise ZeroDivisionError
        closing.append(asyncio.create_task(engine.close()))

    engine.when_due = end

    async def run() -> None:
        with publishing(scene.new) as publish:
            async with serving(engine), asyncio.timeout(60):
                running = asyncio.create_task(collect(engine, ask("a", max_tokens=300)))
                with pytest.raises(EngineError, match=f"weights of version 1: engine watched .*{how}"):
                    await load(engine, publish(1))
                if how == "closed":
                    answer = await running
                    assert (answer.finish, answer.versions) == ("abort", [0])
                else:
                    with pytest.raises(EngineError, match=how):
                        await running

    asyncio.run(run())


def test_updates_follow_each_other(scene: Scene) -> None:
    engine = Watched(scene.old)

    async def run() -> Answer:
        with ExitStack() as stack:
            new, old = (stack.enter_context(publishing(path)) for path in (scene.new, scene.old))
            async with serving(engine):
                running = asyncio.create_task(collect(engine, ask("a", max_tokens=400)))
                acks = await asyncio.gather(load(engine, new(1)), load(engine, old(2)))
                assert [ack.version for ack in acks] == [1, 2]
                return await running

    answer = asyncio.run(run())
    assert answer.versions == [0, 1, 2]
    assert engine.overlapped == [True, True]
    scene.exact(answer)


def test_weights_that_are_on_their_way_count_though_nobody_waits_for_them(scene: Scene) -> None:
    engine, loading = Watched(scene.old), list[asyncio.Task[WeightAck]]()

    async def run() -> Answer:
        with ExitStack() as stack:
            new, old = (stack.enter_context(publishing(path)) for path in (scene.new, scene.old))
            async with serving(engine):
                running = asyncio.create_task(collect(engine, ask("a", max_tokens=400)))
                loading.append(asyncio.create_task(load(engine, new(1))))
                engine.when_due = loading[0].cancel
                await asyncio.wait(loading)
                assert loading[0].cancelled()
                await load(engine, old(2))
                return await running

    answer = asyncio.run(run())
    assert answer.versions == [0, 1, 2]
    scene.exact(answer)


def test_a_step_with_drafts_behind_a_plain_one(scene: Scene) -> None:
    """It reads the running step first, and its own tokens are of the new version."""
    engine = Watched(scene.old, NgramDrafter(tokens=4, min_match=1))
    engine._chooser.forced = Strategy(depth=0)

    def draft() -> None:
        engine._chooser.forced = Strategy(depth=4)

    engine.when_due = draft
    _, answer = update(scene, engine)
    assert engine.stats().drafted_tokens > 0
    assert engine.overlapped == [False]
    assert answer.versions == [0, 1]
    assert [len(answer.segments[0])] == [count + 1 for count in engine.before]
    scene.exact(answer)
