"""FP8 in the engine for GPUs, with its kernels in torch: the numbers it should have, and syncs that leave no doubt."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config import Rollout, Run
from asyncrl.config.drafter import NgramDrafter, NoDrafter
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8, numerics
from asyncrl.engines.native.cuda.engine import CudaEngine
from asyncrl.engines.native.cuda.kernels.shapes import Move
from asyncrl.errors import DivergenceError, EngineError, WeightSyncError
from asyncrl.models.checkpoint import load_model
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import packed_attention
from asyncrl.precision.layers import SCALES
from asyncrl.precision.memory import footprint
from asyncrl.precision.quantizer import E4M3, saturated
from asyncrl.types import TensorSpec, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Follower, OneRank
from pipelines.plan.estimate import needs
from tests.precision.test_engine import engine as simulated
from tests.support.drafters import paged_drafting, save_heads
from tests.support.driving import LONG, Answer, ask, collect, collect_all, serving
from tests.support.fp8_publishing import publishing
from tests.support.tiny_model import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on CPUs without bf16
QUANTIZED = ("fp8", "fp8_kv", "fp8_full")
SETTINGS = Settings(max_batch=8, max_length=256, prefill_chunk=64, device="cuda")


def engine(
    path: Path,
    precision: str,
    drafter: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **fp8: Any,
) -> CudaEngine:
    found, where = numerics(precision, Fp8(**fp8)), torch.device(device)
    return CudaEngine(path, SETTINGS, drafter or NoDrafter(), name="fp8", dtype=dtype, device=where, numerics=found)


def greedy(count: int = 3) -> list[Any]:
    return [ask(str(i), LONG[: 10 + 7 * i], temperature=0.0) for i in range(count)]


async def in_turn(serves: Any) -> list[Answer]:
    """Which requests share a step decides the last bits of sums, and these the rounding of some numbers to FP8."""
    return [await collect(serves, request) for request in greedy()]


def answers(made: Any) -> list[Answer]:
    async def run() -> list[Answer]:
        async with serving(made) as serves:
            return await in_turn(serves)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"power_of_two": True}),
        ("qwen3", {"keep_first": 1}),
        ("qwen3", {"keep_last": 1}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_projections_are_those_of_the_simulation(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Widths that are no multiples of 128."""
    tiny_checkpoint(tmp_path, family, intermediate_size=136)
    simulation = answers(simulated(tmp_path, "fp8", **options))
    differences = []
    for one, other in zip(answers(engine(tmp_path, "fp8", **options)), simulation, strict=True):
        same = int(np.argmin(np.append(one.tokens == other.tokens, False)))
        differences.append(float(np.abs(one.logprobs[:same] - other.logprobs[:same]).max()))
    # Sums differ in their last bits, by 2e-6 here. On some CPUs that turns the rounding of a number of some prompt to
    # FP8, and its answer is off by what FP8 costs; a wrong scale or block would put all of them off.
    *exact, turned = sorted(differences)
    assert max(exact) < 1e-5
    assert turned < 0.2


def test_keys_and_values_are_rounded_and_nothing_else(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    made = engine(tmp_path, "fp8_kv")
    model, _ = load_model(tmp_path)

    async def run() -> tuple[list[Answer], list[list[float]]]:
        async with serving(made) as serves:
            found = await collect_all(serves, greedy())
            assert made._decoding.memory.layers[0].pages_2_X_K_S_D.dtype == E4M3
            return found, made._decoding.memory.scales

    found, scales = asyncio.run(run())
    assert all(np.log2(scale).is_integer() for layer in scales for scale in layer)
    for request, answer in zip(greedy(), found, strict=True):
        tokens = torch.tensor([*request.tokens, *answer.tokens.tolist()])
        plain = packed_attention([len(tokens)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, plain: Any = plain) -> Tensor:
            return plain(layer, q, saturated(k, scales[layer][0]), saturated(v, scales[layer][1]))

        with torch.no_grad():
            logits = model.logits(model(tokens, torch.arange(len(tokens)), attend)).log_softmax(-1)
        expected = logits[len(request.tokens) - 1 : -1].gather(1, tokens[len(request.tokens) :, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_version_is_served_with_its_own_scales(precision: str, tmp_path: Path) -> None:
    """What an engine computes after a sync is what one that starts with those weights does, from the same storage."""
    tiny_checkpoint(tmp_path / "old")
    tiny_checkpoint(tmp_path / "new", seed=1)

    async def run() -> list[Answer]:
        with publishing(tmp_path / "new", precision, "cuda", dtype=torch.bfloat16, kv_scales="engine") as new:
            made = engine(tmp_path / "old", precision, dtype=torch.bfloat16)
            async with serving(made) as synced:
                places = {name: tensor.data_ptr() for name, tensor in made._intake.held.items()}
                manifest = new.publish(1)
                weights_travel = {spec.name: spec.dtype for spec in manifest.tensors}
                in_fp8 = weights_travel["model.layers.0.mlp.up_proj.weight"] == "float8_e4m3fn"
                assert in_fp8 == (precision != "fp8_kv")
                assert weights_travel["model.norm.weight"] == "bfloat16"
                ack = await synced.load_weights(manifest, "keep")
                assert (ack.version, ack.digest) == (1, manifest.digest)
                assert places == {name: tensor.data_ptr() for name, tensor in made._intake.held.items()}
                return await in_turn(synced)

    found = asyncio.run(run())
    for one, other in zip(found, answers(engine(tmp_path / "new", precision, dtype=torch.bfloat16)), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def _refused(tmp_path: Path, manifest: WeightManifest, error: type[Exception], said: str) -> None:
    """The refusal, and that answers are afterwards what they were before."""

    async def run() -> None:
        async with serving(engine(tmp_path, "fp8_full")) as serves:
            before = await collect_all(serves, greedy())
            with pytest.raises(error, match=said):
                await serves.load_weights(manifest, "recompute")
            assert serves.stats().version == 0
            for one, other in zip(before, await collect_all(serves, greedy()), strict=True):
                np.testing.assert_array_equal(one.logprobs, other.logprobs)

    asyncio.run(run())


def test_stale_weight_scales_are_seen_by_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values with the scales of the version before, as an engine has them that forgets to load scales."""
    tiny_checkpoint(tmp_path)
    make = Move.make

    def forgetful(move: Move, flat: Flat) -> None:
        if not move.spec.name.endswith(SCALES):
            make(move, flat)

    monkeypatch.setattr(Move, "make", forgetful)
    with publishing(tmp_path, "fp8_full", "cuda") as trainer:
        trainer.grow(1.5, "o_proj")
        said = r"a product with model\.layers\.1\.self_attn\.o_proj\.weight in FP8 is off by 33.*stale scales"
        _refused(tmp_path, trainer.publish(1), WeightSyncError, said)


def test_stale_kv_scales_are_seen_by_the_engine(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full", "cuda") as trainer:
        trainer.fp8._seen.extend([list(LONG), list(LONG[::-1])])
        stale = trainer.fp8.of(trainer.model)()
        trainer.grow(8.0)
        manifest = msgspec.structs.replace(trainer.publish(1), fp8=stale)
        _refused(tmp_path, manifest, WeightSyncError, "the scale of values in layer 0 is .*: stale scales")


def test_both_sides_must_quantize_the_same_layers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full", "cuda", fp8=Fp8(keep_first=1)) as trainer:
        _refused(tmp_path, trainer.publish(1), WeightSyncError, r"same layers, differing in model\.layers\.0\.mlp\.")
    with publishing(tmp_path, "fp8", "cuda") as trainer:
        _refused(tmp_path, trainer.publish(1), WeightSyncError, "differing in kv_cache")


def test_a_version_that_is_not_meant_for_fp8_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full", "cuda") as trainer:
        manifest = msgspec.structs.replace(trainer.publish(1), fp8=None)
        _refused(tmp_path, manifest, WeightSyncError, "cannot leave FP8 while it runs")


def test_weights_that_are_not_finite_never_leave_the_trainer(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8_full", "cuda") as trainer:
        weight = trainer.model.blocks()[1].down_proj.weight.data
        weight[3, 3] = torch.nan
        with pytest.raises(DivergenceError, match=r"model\.layers\.1\.mlp\.down_proj\.weight has values that are inf"):
            trainer.publish(1)
        weight[3, 3] = 1.0
        trainer.publish(1)


def test_keys_that_are_kept_survive_new_scales(tmp_path: Path) -> None:
    """With scales 8 times as large, all but the smallest numbers are what they were."""
    tiny_checkpoint(tmp_path)
    made = engine(tmp_path, "fp8_kv")

    async def run() -> None:
        async with serving(made) as serves:
            await collect_all(serves, greedy())
            memory = made._decoding.memory
            before = [kv.pages_2_X_K_S_D.float() * kv.scales_2[:, None, None, None, None] for kv in memory.layers]
            with torch.inference_mode():
                memory.rescale(tuple((1.0, 8 * k, v) for k, v in memory.scales))
            for old, kv in zip(before, memory.layers, strict=True):
                assert kv.scales_2 is not None
                new = kv.pages_2_X_K_S_D.float() * kv.scales_2[:, None, None, None, None]
                large = old.abs() >= 8 * kv.scales_2[0]
                assert large[0].any()
                assert torch.equal(new[0][large[0]], old[0][large[0]])
                assert torch.equal(new[1], old[1])

    asyncio.run(run())


def test_keys_in_fp8_need_qk_norm(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(EngineError, match="need a model with QK-norm"):
        answers(engine(tmp_path, "fp8_full"))
    answers(engine(tmp_path, "fp8_full", allow_kv_without_qk_norm=True))


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_drafts_change_nothing(kind: str, tmp_path: Path) -> None:
    """The head stays as it is, with pages of its own."""
    tiny_checkpoint(tmp_path)
    heads = tmp_path / "heads"
    heads.mkdir()
    save_heads(tmp_path, heads)
    drafter = NgramDrafter(tokens=3) if kind == "ngram" else paged_drafting(kind, heads, "cpu")(tmp_path)._drafter
    drafted = answers(engine(tmp_path, "fp8_full", drafter))
    for one, other in zip(answers(engine(tmp_path, "fp8_full")), drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


class NoRank(OneRank):
    """A rank that takes part in gathers and gets nothing."""

    def gather(self, spec: TensorSpec) -> Any:
        super().gather(spec)


def test_ranks_that_do_not_send_know_the_same_layout(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with publishing(tmp_path, "fp8", "cuda", fp8=Fp8(keep_last=1)) as trainer:
        manifest = trainer.publish(1)
        follower = Follower(trainer.fp8.travelling(NoRank(lambda: hf_tensors(trainer.model))))
        for version in (1, 2):
            followed = follower.publish(version)
            assert (followed.tensors, followed.total_bytes) == (manifest.tensors, manifest.total_bytes)
    names = [spec.name for spec in manifest.tensors if spec.name.endswith(SCALES)]
    assert len(names) == 7
    assert all(name.startswith("model.layers.0.") for name in names)


def test_a_plan_counts_what_a_gpu_holds(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    model = load_model(tmp_path)[1]
    found = {
        device: needs(Run(rollout=Rollout(precision="fp8_full"), engine=Settings(device=device)), model, 8)
        for device in ("cpu", "cuda")
    }
    assert found["cpu"].engine_weights == 4 * found["cpu"].parameters
    exact = footprint(model, found["cuda"].parameters, "fp8_full", Fp8())
    assert found["cuda"].engine_weights == found["cuda"].published == exact.weights
    assert 4 * found["cuda"].kv_cache == found["cpu"].kv_cache
