"""Publications between real actors in one process: what counts, and what happens to answers when it does not."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from actors.buffer import BufferActor
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.rollout.quarantine import Quarantine
from actors.trainer.actor import TrainerActor
from asyncrl.config import Checkpoint, Flow, Rollout, Run, WarmStart, Weights
from asyncrl.config.engine import FakeEngine, NativeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.errors import WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.training.warm_start import make_model
from asyncrl.types import Probe, Prompt, SendOrder, WeightManifest
from tests.support.in_process_actors import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = WarmStart(hidden_size=32, heads=2, intermediate_size=64, steps=2, batch_tokens=64)
    return make_model(shape, ChainsTask(), 0, tmp_path_factory.mktemp("model"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


class Trainer(TrainerActor):
    """A trainer whose weights move on demand, and whose next publications can be spoiled."""

    bad_bits = 0
    bad_probes = 0

    def move(self) -> None:
        with torch.no_grad():
            self._learner.model.norm += 0.5
        self._learner.version += 1

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        manifest = await super().export_weights(order)
        if self.bad_bits:
            self.bad_bits -= 1
            _flip(Path(manifest.location))
        if self.bad_probes and manifest.probe is not None:
            self.bad_probes -= 1  # as if the engine computed something else than the trainer
            others = tuple(value - 0.002 for value in manifest.probe.logprobs)
            probe = Probe(manifest.probe.prompts, others, manifest.probe.tolerance)
            manifest = msgspec.structs.replace(manifest, probe=probe)
        return manifest


class Scene:
    def __init__(self, run: Run, model: Path, directory: Path) -> None:
        self.buffer = BufferActor(run, directory / "trajectories", None)
        self.reward = RewardActor(run.reward)
        self.trainer = Trainer(run, model, directory / "checkpoints", self.buffer)
        self.rollout = RolloutActor(run, model, "rollout-0", self.buffer, self.reward)
        self.publisher = Publisher(self.trainer, FleetState({"rollout-0": self.rollout}), deadline_s=60, export_s=60)

    async def version(self) -> int:
        return (await self.rollout.stats()).version

    async def answering(self) -> "asyncio.Task[None]":
        """Answers that are being written, and more that wait."""
        prompts = [(t, Prompt(uid=str(t.group), text="3+4=")) for t in await self.buffer.admit(1.0)]
        before = (await self.rollout.stats()).generated_tokens
        generating = asyncio.create_task(self.rollout.generate(prompts))
        while (await self.rollout.stats()).generated_tokens < before + 6:  # noqa: ASYNC110  (a counter, not an event)
            await asyncio.sleep(0)
        stats = await self.rollout.stats()
        assert stats.running == 2
        assert stats.waiting > 0
        return generating


@asynccontextmanager
async def scene(
    model: Path, directory: Path, *, engine: NativeEngine | FakeEngine | None = None, probe: bool = True
) -> AsyncGenerator[Scene, None]:
    run = Run(
        name="test",
        cluster="inprocess",
        model=Checkpoint(str(model)),
        engine=engine or NativeEngine(max_batch=2, max_length=128, device="cpu"),
        rollout=Rollout(group_size=2, max_tokens=40),
        flow=Flow(groups_per_step=2, groups_per_take=1, max_ready_groups=0),
        weights=Weights(probe=probe),
    )
    async with serving(Scene(run, model, directory)) as at:
        yield at


def test_a_version_counts_with_its_digest_and_its_probe(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            for version in (1, 2):
                at.trainer.move()
                published = await at.publisher.publish()
                assert (published.version, published.attempts) == (version, 1)
                assert published.probe_gap is not None
                assert published.probe_gap < 1e-4
                assert await at.version() == version

    asyncio.run(scenario())


def test_the_probe_sees_what_no_digest_does(model: Path, tmp_path: Path) -> None:
    """An engine that computes with other weights than it was given, though it has read them right."""

    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            load = at.rollout._engine.load_weights
            other = Trainer(at.trainer._run, model, tmp_path / "other", at.buffer)
            other._learner.model.norm.data *= 3.0

            async def load_others(manifest: WeightManifest, on_update: str):
                wrong = await other.export_weights(SendOrder())
                ack = await load(msgspec.structs.replace(wrong, version=manifest.version), "keep")
                return msgspec.structs.replace(ack, digest=manifest.digest)

            at.rollout._engine.load_weights = load_others
            at.trainer.move()
            with pytest.raises(WeightSyncError, match="engine rollout-0 does not compute what the trainer does"):
                await at.publisher.publish()
            await other.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["bad_bits", "bad_probes"])
def test_one_failure_is_sent_again_and_two_stop_it(what: str, model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            at.trainer.move()
            await at.publisher.publish()
            at.trainer.move()
            setattr(at.trainer, what, 1)
            published = await at.publisher.publish()
            assert (published.version, published.attempts, await at.version()) == (2, 2, 2)
            at.trainer.move()
            setattr(at.trainer, what, 2)
            with pytest.raises(WeightSyncError, match="version 3 does not count, version 2 does: engine") as caught:
                await at.publisher.publish()
            assert "version 2 is " in str(caught.value), "kept, or served again"
            assert await at.version() == 2
            published = await at.publisher.publish()
            assert (published.version, await at.version()) == (3, 3)

    asyncio.run(scenario())


def test_answers_under_a_version_that_fails_its_probe_never_reach_the_buffer(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            at.trainer.move()
            await at.publisher.publish()
            generating = await at.answering()
            at.trainer.move()
            at.trainer.bad_probes = 1
            assert (await at.publisher.publish()).attempts == 2
            await generating
            ledger = await at.buffer.ledger()
            assert ledger.balanced
            assert set(ledger.dropped) == {"unverified", "group_incomplete"}
            assert sum(ledger.dropped.values()) == ledger.leased

    asyncio.run(scenario())


def test_the_probe_goes_before_all_that_wait(model: Path, tmp_path: Path) -> None:
    """Two rows, and many answers in the queue: the version counts long before they are written."""

    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            generating = await at.answering()
            at.trainer.move()
            await at.publisher.publish()
            assert (await at.rollout.stats()).waiting > 0
            await generating

    asyncio.run(scenario())


def test_an_engine_without_a_model_acknowledges_without_a_probe(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, engine=FakeEngine()) as at:
            at.trainer.move()
            published = await at.publisher.publish()
            assert (published.version, published.probe_gap) == (1, None)

    asyncio.run(scenario())


def test_the_probe_can_be_left_out(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, probe=False) as at:
            at.trainer.move()
            assert (await at.publisher.publish()).probe_gap is None

    asyncio.run(scenario())


def test_a_replica_that_joins_late_is_given_what_a_peer_serves(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path) as at:
            with pytest.raises(WeightSyncError, match="rollout-0 has been given no version yet; ask the trainer"):
                await at.rollout.export(tmp_path / "late")
            at.trainer.move()
            published = await at.publisher.publish()
            manifest = await at.rollout.export(tmp_path / "late")
            assert (manifest.version, manifest.digest) == (1, published.digest)

    asyncio.run(scenario())


def test_answers_wait_for_the_verdict() -> None:
    async def scenario() -> None:
        trial = Quarantine()
        with trial.running("good"):
            assert not await trial.spoiled("good")
        with trial.running("a"), trial.running("b"):
            async with trial.hold():
                asking = asyncio.create_task(trial.spoiled("a"))
                await asyncio.sleep(0)
                assert not asking.done()
                assert trial.reject() == ["a", "b"]
            assert await asking
            assert await trial.spoiled("b")
        with trial.running("a"):
            assert not await trial.spoiled("a"), "another attempt under the same name"

    asyncio.run(scenario())
