"""The trainer on a GPU: its own kernels against the plain path, and the memory that was predicted."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import Grpo, Importance
from asyncrl.config.engine import NativeEngine
from asyncrl.models import grouped
from asyncrl.models.checkpoint import save_model
from asyncrl.models.config import ModelConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.head import bf16_logits, chunked_logprobs
from asyncrl.models.names import hf_tensors
from asyncrl.models.packed import Indices, flash, row_attention, span_attention
from asyncrl.precision.kv_scales import measure
from asyncrl.training import checkpoint
from asyncrl.training.background_save import BackgroundSave
from asyncrl.training.batches import block, pack
from asyncrl.training.checkpoint_manifest import TrainingManifest
from asyncrl.training.learner import Learner
from asyncrl.training.memory import Batch, recomputed_layers, training_memory
from tests.support import needs
from tests.support.experts import EMPTY, EXPERTS, answer_and_gradients, random_leaves
from tests.support.gpu_waits import waits
from tests.support.training_groups import gradients_of, make_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=needs.GPU),
]
CUDA = torch.device("cuda")
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}

MIXTURE = SHAPE | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
"""As many layers and experts as the routes of `make_groups` are for."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _random_model(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def mixture_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _random_model(tmp_path_factory.mktemp("mixture"), MIXTURE)


def _random_model(directory: Path, shape: dict[str, Any]) -> Path:
    config = ModelConfig.from_hf(shape)
    model = Decoder(config, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in hf_tensors(model):
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, config.initializer_range, generator=generator)
    save_model(model, directory)
    return directory


def _trainer(**settings: Any) -> Trainer:
    return msgspec.convert({"dtype": "bf16", "device": "cuda"} | settings, Trainer)


def _run(trainer: Trainer) -> Run:
    """Nothing is rejected: the answers are random, and a step without gradients would prove nothing."""
    return Run(trainer=trainer, correction=Importance(weight="none", reject=()))


def _rows() -> list[Indices]:
    """Two prompts with three answers each, one of them empty."""
    rows: list[Indices] = []
    end = 0
    for prompt, answers in ((70, (5, 130, 0)), (1, (64, 1, 257))):
        shared, end = np.arange(end, end + prompt), end + prompt
        for answer in answers:
            rows.append(np.concatenate([shared, np.arange(end, end + answer)]))
            end += answer
    return rows


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (16, 8, 128), (4, 4, 64)])
def test_flash_attention_over_shared_prompts_equals_padded_rows(heads: int, kv_heads: int, dim: int) -> None:
    rows = _rows()
    tokens = int(max(row.max() for row in rows)) + 1
    generator = torch.Generator(CUDA).manual_seed(0)
    q, k, v, weight = (
        torch.randn(tokens, n, dim, device=CUDA, generator=generator) for n in (heads, kv_heads, kv_heads, heads)
    )
    narrow = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    found, expected = span_attention(rows, CUDA, flash)(0, *narrow), row_attention(rows, CUDA)(0, *wide)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    gradients = [
        torch.autograd.grad((out * weight.flatten(1)).sum(), inputs)
        for out, inputs in ((found.float(), narrow), (expected, wide))
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()


def test_logprobs_in_chunks_equal_the_plain_path() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden, output = (torch.randn(n, 512, device=CUDA, generator=generator) for n in (1000, 32_000))
    hidden, output = hidden.bfloat16().requires_grad_(), (0.05 * output).bfloat16().requires_grad_()
    target = torch.randint(32_000, (1000,), device=CUDA, generator=generator)
    weight = torch.randn(1000, device=CUDA, generator=generator)
    found = chunked_logprobs(hidden, output, target, temperature=0.9, chunk=300).logp_L
    logits = bf16_logits(hidden, output) / 0.9
    expected = logits.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    one, other = (torch.autograd.grad((logp * weight).sum(), (hidden, output)) for logp in (found, expected))
    for mine, plain in zip(one, other, strict=True):
        assert (mine.float() - plain.float()).norm() < 0.01 * plain.float().norm()


def test_a_step_in_bf16_agrees_with_fp32(model_path: Path) -> None:
    groups = make_groups(8, vocabulary=32_000, longest=200)
    wide, narrow = (
        Learner(model_path, _run(Trainer(dtype=dtype, device="cuda", grad_clip=1e9, logits_bytes=1 << 26)))
        for dtype in ("fp32", "bf16")
    )
    (batch,) = pack((block(group, [1.0] * 4) for group in groups), 100_000)
    batch = batch.to(CUDA)
    with torch.no_grad():
        difference = (wide.token_logprobs(batch) - narrow.token_logprobs(batch)).abs()
    assert difference.mean() < 0.03
    for learner in (wide, narrow):
        learner.accumulate(groups)
    for one, other in zip(gradients_of(narrow), gradients_of(wide), strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.98


SAME_GRADIENTS = {
    "kept": {"checkpoint_activations": False},
    "recomputed": {"checkpoint_activations": True},
    "some layers": {"checkpoint_activations": 3},
    "8 bits": {"optimizer": "adamw_8bit"},
    "offloaded": {"offload": "optimizer"},
    "adapters": {"lora": {"rank": 4}},
    "top-p and top-k": {},
}


@pytest.mark.parametrize("kind", SAME_GRADIENTS)
def test_compiled_gradients_are_as_near_to_fp32_as_those_of_the_plain_path(model_path: Path, kind: str) -> None:
    """Batches of several lengths, so that what was compiled for the first serves the others."""
    groups = make_groups(12, vocabulary=32_000, longest=200)
    common: dict[str, Any] = {"grad_clip": 1e9, "token_budget": 2500, "logits_bytes": 1 << 25, **SAME_GRADIENTS[kind]}
    rollout = Rollout(top_p=0.9, top_k=20_000) if kind == "top-p and top-k" else Rollout()
    found: list[list[torch.Tensor]] = []
    for dtype, compile in (("fp32", "off"), ("bf16", "off"), ("bf16", "on")):
        run = _run(_trainer(**common | {"dtype": dtype, "compile": compile}))
        learner = Learner(model_path, msgspec.structs.replace(run, algorithm=Grpo(entropy=0.01), rollout=rollout))
        learner.accumulate(groups)
        found.append([gradient.clone() for gradient in gradients_of(learner)])
    for exact, plain, compiled in zip(*found, strict=True):
        assert (compiled - exact).norm() <= 1.2 * (plain - exact).norm() + 1e-3 * exact.norm()


def test_state_in_host_memory_gives_the_same_weights(model_path: Path) -> None:
    """Attention adds up in any order, and Adam makes a step of any difference: of at most three rates."""
    rate, found = 1e-3, list[list[torch.Tensor]]()
    for offload in ("none", "optimizer"):
        learner = Learner(model_path, _run(_trainer(offload=offload, lr=rate)))
        before = [tensor.clone() for _, tensor in learner.tensors()]
        for seed in range(3):
            learner.accumulate(make_groups(4, seed, vocabulary=32_000, longest=60))
            learner.step()
        found.append([after - start for (_, after), start in zip(learner.tensors(), before, strict=True)])
    for one, other in zip(*found, strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.95


@pytest.mark.parametrize("layers", [False, True, 2])
@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize(
    "state", [{}, {"offload": "optimizer"}, {"optimizer": "adamw_8bit"}], ids=["plain", "offload", "8bit"]
)
def test_the_peak_is_within_a_tenth_of_the_prediction(
    model_path: Path, layers: bool | int, compile: str, state: dict[str, str]
) -> None:
    settings = _trainer(
        token_budget=16_384, checkpoint_activations=layers, logits_bytes=1 << 28, compile=compile, **state
    )
    run = _run(settings)
    gc.collect()  # the learner of the test before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    learner = Learner(model_path, run)
    groups = make_groups(80, vocabulary=32_000, longest=400)
    for _ in range(2):
        learner.accumulate(groups)
        report = learner.step()
    blocks = [block(group, [1.0] * 4) for group in groups]
    seen = max((int(b.tokens_T.numel()), sum(map(len, b.rows))) for b in pack(blocks, settings.token_budget))
    batch, config = Batch(seen[0], seen[1] / seen[0]), learner.model_config
    again = recomputed_layers(run, config, None)
    predicted = training_memory(run, config, batch, recomputed=again, compiled=compile == "on")
    assert predicted.peak == pytest.approx(report.figures["trainer_peak_memory_bytes"] - before, rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "fp32"}, {"offload": "optimizer", "optimizer": "adamw_8bit"}, {"lora": {"rank": 4}}],
    ids=["bf16", "fp32", "offloaded", "adapters"],
)
def test_a_checkpoint_that_is_copied_beside_a_backward_is_the_state_before_it(
    model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """And the copy takes none of the card's memory."""
    run, groups = _run(_trainer(**settings)), make_groups(24, vocabulary=32_000, longest=200)
    learner = Learner(model_path, run)
    for _ in range(2):
        learner.accumulate(groups)
        learner.step()
    expected = {name: tensor.clone() for name, tensor in learner.tensors()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    manifest = TrainingManifest(step=2, samples_trained=1, consumed=((0, 1),))

    async def scenario() -> None:
        saving = BackgroundSave(tmp_path, model_path=model_path, keep=1)
        await saving.save(learner, manifest)
        await saving.copied()
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
        await saving.save(learner, manifest)
        learner.accumulate(groups)
        await saving.copied()
        learner.step()
        await saving.written()
        saving.close()

    asyncio.run(scenario())
    again = Learner(model_path, run)
    checkpoint.restore(again, tmp_path / "step-2")
    torch.testing.assert_close(dict(again.tensors()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("adapted", [False, True])
def test_grouped_products_of_experts_are_those_of_the_loop_in_fp32(adapted: bool) -> None:
    leaves = {name: leaf.to(CUDA) for name, leaf in random_leaves(adapted=adapted).items()}
    wanted, gradients = answer_and_gradients(leaves)
    dirty = torch.full((1 << 24,), torch.nan, device=CUDA)  # what the kernel's results lie in next
    del dirty
    found, of_found = answer_and_gradients({name: leaf.bfloat16() for name, leaf in leaves.items()})
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    for name, gradient in gradients.items():
        assert (of_found[name] - gradient).norm() < 0.015 * gradient.norm(), name
        assert name == "x" or not of_found[name].view(EXPERTS, -1)[EMPTY].any(), name


def _never(*_: object) -> bool:
    return False


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}], ids=["all weights", "adapters"])
@pytest.mark.parametrize("recompute", [False, True])
def test_with_replayed_routes_grouped_gradients_are_as_near_to_fp32_as_looped_ones(
    mixture_path: Path, settings: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups(12, vocabulary=32_000, longest=200)
    common: dict[str, Any] = {"grad_clip": 1e9, "token_budget": 2500, "checkpoint_activations": recompute, **settings}
    plain, found = grouped.has_kernel, list[list[torch.Tensor]]()
    for dtype, looped in (("fp32", False), ("bf16", True), ("bf16", False)):
        monkeypatch.setattr(grouped, "has_kernel", _never if looped else plain)
        run = msgspec.structs.replace(_run(_trainer(**common | {"dtype": dtype})), engine=NativeEngine(device="cpu"))
        learner = Learner(mixture_path, run)
        learner.accumulate(groups)
        found.append([gradient.clone() for gradient in gradients_of(learner)])
    for exact, loop, kernel in zip(*found, strict=True):
        assert (kernel - exact).norm() <= 1.2 * (loop - exact).norm() + 1e-3 * exact.norm()


def test_the_host_runs_ahead_of_a_card_with_experts(mixture_path: Path) -> None:
    run = msgspec.structs.replace(_run(_trainer()), engine=NativeEngine(device="cpu"))
    learner, groups = Learner(mixture_path, run), make_groups(8, vocabulary=32_000, longest=200)
    learner.accumulate(groups)  # what is made once
    (batch,) = pack((block(group, [1.0] * 4) for group in groups), 100_000)
    batch = batch.to(CUDA)
    assert waits(lambda: learner.token_logprobs(batch)) <= 3
    assert waits(lambda: learner.accumulate(groups)) <= 20


def test_the_host_runs_ahead_of_the_card(model_path: Path) -> None:
    """A wait in every layer, or for every figure, would leave the card idle as often."""
    learner = Learner(model_path, _run(Trainer(dtype="bf16", device="cuda")))
    groups = make_groups(8, vocabulary=32_000, longest=200)
    learner.accumulate(groups)  # what is made once
    (batch,) = pack((block(group, [1.0] * 4) for group in groups), 100_000)
    batch = batch.to(CUDA)
    assert waits(lambda: learner.token_logprobs(batch)) <= 3
    assert waits(lambda: learner.accumulate(groups)) <= 20


def test_kv_scales_in_bf16_are_those_of_fp32_and_wait_for_the_card_once(model_path: Path) -> None:
    wide, narrow = (Learner(model_path, _run(Trainer(dtype=dtype, device="cuda"))) for dtype in ("fp32", "bf16"))
    samples = [np.random.default_rng(seed).integers(0, 32_000, 20 + 9 * seed).tolist() for seed in range(24)]
    found = measure(narrow.model, samples, CUDA, narrow=True)
    np.testing.assert_allclose(found, measure(wide.model, samples, CUDA), rtol=0.05)
    assert waits(lambda: measure(narrow.model, samples, CUDA, narrow=True)) == 1
