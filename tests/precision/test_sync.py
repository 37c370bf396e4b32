"""Publications between real actors: stale scales stop at the probe, and no token that they touched is trained on."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.buffer import BufferActor
from actors.publisher import Publisher
from actors.reward import RewardActor
from actors.rollout.actor import RolloutActor
from actors.trainer.actor import TrainerActor
from asyncrl.config import Checkpoint, Flow, Rollout, Run, WarmStart
from asyncrl.config.engine import NativeEngine
from asyncrl.config.task import ChainsTask
from asyncrl.data.arrow import decode
from asyncrl.engines.native.cpu import fp8
from asyncrl.errors import WeightSyncError
from asyncrl.fleet.state import FleetState
from asyncrl.training.warm_start import make_model
from asyncrl.types import Fp8Version, Prompt, SendOrder, Trajectory, WeightManifest
from tests.precision.test_engine import StaleScales
from tests.support.in_process_actors import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = WarmStart(hidden_size=32, heads=2, intermediate_size=64, steps=2, batch_tokens=64)
    return make_model(shape, ChainsTask(), 0, tmp_path_factory.mktemp("model"))


class Trainer(TrainerActor):
    """Its weights move on demand, and KV scales can get stuck."""

    stuck: Fp8Version | None = None

    def move(self, factor: float) -> None:
        with torch.no_grad():
            for layer in self._learner.model.blocks():
                layer.qkv_proj.weight *= factor
        self._learner.version += 1

    def fall_back(self) -> None:
        self._guardrails.fell_back = True

    async def export_weights(self, order: SendOrder) -> WeightManifest:
        manifest = await super().export_weights(order)
        return msgspec.structs.replace(manifest, fp8=self.stuck) if self.stuck is not None else manifest


class Scene:
    def __init__(self, run: Run, model: Path, directory: Path) -> None:
        self.buffer = BufferActor(run, directory / "trajectories", None)
        self.reward = RewardActor(run.reward)
        self.trainer = Trainer(run, model, directory / "checkpoints", self.buffer)
        self.rollout = RolloutActor(run, model, "rollout-0", self.buffer, self.reward)
        self.publisher = Publisher(self.trainer, FleetState({"rollout-0": self.rollout}), deadline_s=60, export_s=60)

    async def answer(self) -> list[Trajectory]:
        """One whole step of answers, from the buffer as the trainer gets them."""
        work = [(t, Prompt(uid=str(t.group), text="3+4=")) for t in await self.buffer.admit(1.0)]
        await self.rollout.generate(work)
        delivery = await self.buffer.take(2, 2, 10.0)
        return [decode(payload) for payload in await self.buffer.read(delivery)]


@asynccontextmanager
async def scene(model: Path, directory: Path, precision: Any) -> AsyncGenerator[Scene, None]:
    run = Run(
        name="test",
        cluster="inprocess",
        model=Checkpoint(str(model)),
        engine=NativeEngine(max_batch=8, max_length=128, device="cpu"),
        rollout=Rollout(group_size=2, max_tokens=12, precision=precision),
        flow=Flow(groups_per_step=2, groups_per_take=2),
        max_staleness=0,
    )
    async with serving(Scene(run, model, directory)) as at:
        yield at


@pytest.mark.parametrize("precision", ["fp8", "fp8_kv", "fp8_full"])
def test_fresh_scales_pass(precision: str, model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, precision) as at:
            answers = await at.answer()
            assert {answer.precision for answer in answers} == {precision}
            for version, factor in enumerate((1.0, 1.5, 0.5), start=1):
                at.trainer.move(factor)
                published = await at.publisher.publish()
                assert (published.version, published.attempts) == (version, 1)
                assert published.probe_gap is not None
                assert 0 < published.probe_gap < 0.1

    asyncio.run(scenario())


def test_stale_weight_scales_never_reach_training(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on under the version before: exactly the tokens that it would have sampled anyway."""
    monkeypatch.setattr(fp8, "quantized_weight", StaleScales())

    async def scenario() -> None:
        async with scene(model, tmp_path, "fp8_full") as at:
            at.trainer.move(1.3)
            with pytest.raises(WeightSyncError, match=r"a product with .* in FP8 is off by 23.*stale scales"):
                await at.publisher.publish()
            assert (await at.rollout.stats()).version == 0
            assert {token for answer in await at.answer() for token in answer.versions} == {-1, 0}

    asyncio.run(scenario())


def test_stale_kv_scales_never_reach_training(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, "fp8_full") as at:
            at.trainer._fp8._seen.extend(answer.tokens.tolist() for answer in await at.answer())
            at.trainer.move(1.0)
            await at.publisher.publish()
            at.trainer.stuck = at.trainer._fp8.of(at.trainer._learner.model)()
            assert at.trainer.stuck is not None
            assert len(at.trainer.stuck.kv_scales) == at.trainer._learner.model_config.layers
            at.trainer.move(20.0)
            with pytest.raises(WeightSyncError, match=r"the scale of values in layer 0 is .*: stale scales"):
                await at.publisher.publish()
            assert (await at.rollout.stats()).version == 1

    asyncio.run(scenario())


def test_scales_come_from_the_tokens_trained_on(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, "fp8_full") as at:
            first = await at.trainer.export_weights(SendOrder())
            assert first.fp8 is not None
            assert first.fp8.kv_scales == (), "before the first step the engine finds them"
            work = [(t, Prompt(uid=str(t.group), text="3+4=")) for t in await at.buffer.admit(1.0)]
            await at.rollout.generate(work)
            await at.trainer.accumulate(await at.buffer.take(2, 2, 10.0))
            await at.trainer.step()
            before = await at.trainer.export_weights(SendOrder())
            at.trainer.move(2.0)
            after = await at.trainer.export_weights(SendOrder())
            assert before.fp8 is not None
            assert after.fp8 is not None
            # Values double with their weights; queries and keys go through QK-norm.
            for (q, k, v), (new_q, new_k, new_v) in zip(before.fp8.kv_scales, after.fp8.kv_scales, strict=True):
                assert (new_q, new_k) == pytest.approx((q, k), rel=0.05)
                assert new_v == pytest.approx(2 * v, rel=0.35)

    asyncio.run(scenario())


def test_a_run_that_falls_back_samples_without_fp8(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(model, tmp_path, "fp8_full") as at:
            at.trainer.fall_back()
            at.trainer.move(1.0)
            published = await at.publisher.publish()
            assert published.probe_gap is not None
            assert published.probe_gap < 1e-4
            assert {answer.precision for answer in await at.answer()} == {"fp32"}

    asyncio.run(scenario())
